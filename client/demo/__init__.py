"""`weightcached demo`: the whole story on one machine, with a table of measured seconds at the end."""
