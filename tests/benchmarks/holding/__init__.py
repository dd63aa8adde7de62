"""The processes of the benchmark `holder`: who holds memory, who starts that one and takes it along, who reads."""
