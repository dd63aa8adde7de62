# From a fresh set of namespaces to systemd as process 1, on a throw-away copy of this machine. Started by box.py:
#
#     boot.sh BASE SCRATCH CHANNEL TREE...
#
# BASE is the root to copy: / or another system's. SCRATCH is an empty folder; everything the box writes is memory mounted
# there. CHANNEL is a folder that inside is /run/box. Each TREE is at its own path inside, usable by every user, whatever
# the folders above it allow out here.
set -eu
base=$1 scratch=$2 channel=$3
shift 3

mount -t tmpfs -o mode=755 box "$scratch"
cd "$scratch"
mkdir root
layer() { # layer NUMBER PATH PLACE: what is at PATH out here, at PLACE inside, with writes going nowhere
    mkdir -p "upper$1" "work$1"
    mount -t overlay -o "lowerdir=$2,upperdir=upper$1,workdir=work$1" overlay "root$3"
}
layer 0 "$base" /
number=0
for tree in "$@"; do
    number=$((number + 1))
    mkdir -p "root$tree"
    if [ "$base" != / ] || [ "$(stat -c %d "$tree")" != "$(stat -c %d /)" ]; then layer $number "$tree" "$tree"; fi
    while [ "$tree" != / ]; do # the copies in the overlay, not this machine's folders
        chmod o+rx "root$tree"
        tree=$(dirname "$tree")
    done
done

cd root
mount -t proc proc proc
mount -o bind,ro proc/sys proc/sys
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs -o mode=755 dev dev
for node in null zero full random urandom tty; do
    touch dev/$node
    mount --bind /dev/$node dev/$node
done
ln -s /proc/self/fd dev/fd
ln -s /proc/self/fd/0 dev/stdin
ln -s /proc/self/fd/1 dev/stdout
ln -s /proc/self/fd/2 dev/stderr
mkdir dev/shm dev/pts
mount -t tmpfs -o mode=1777 shm dev/shm
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts dev/pts
ln -s pts/ptmx dev/ptmx
mount -t tmpfs -o mode=755 run run
mount -t tmpfs -o mode=755 srv srv # for models: a file system whose inode and ctime can be trusted
mkdir run/box
mount --bind "$channel" run/box

# No mounts, timers, hardware or network services of this machine: a target of its own, and what every service needs.
: >etc/fstab
rm -rf var/log/journal
for unit in systemd-tmpfiles-setup.service systemd-tmpfiles-setup-dev.service systemd-sysctl.service \
    systemd-modules-load.service systemd-timesyncd.service systemd-udevd.service systemd-udev-trigger.service \
    systemd-udevd-control.socket systemd-udevd-kernel.socket systemd-remount-fs.service systemd-sysusers.service \
    systemd-update-utmp.service systemd-random-seed.service systemd-pstore.service keyboard-setup.service \
    tmp.mount dev-hugepages.mount dev-mqueue.mount sys-kernel-debug.mount sys-kernel-tracing.mount \
    sys-fs-fuse-connections.mount sys-kernel-config.mount proc-sys-fs-binfmt_misc.automount; do
    ln -sf /dev/null "etc/systemd/system/$unit"
done
mkdir -p run/systemd/system
printf '[Unit]\nRequires=sysinit.target\nWants=dbus.socket\nAfter=sysinit.target dbus.socket\n' >run/systemd/system/box.target

mkdir -p old
pivot_root . old
umount -l /old
exec env -i container=box PATH=/usr/sbin:/usr/bin:/sbin:/bin NOTIFY_SOCKET=/run/box/notify \
    /lib/systemd/systemd --system --unit=box.target --show-status=false --log-target=journal-or-kmsg --log-level=notice
