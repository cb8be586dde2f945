#!/bin/bash
# One host of a network lab: ssh_host.sh DIRECTORY COMMAND...
#
# Every host serves ssh to the others; host 0 runs the command, and its end is the end of all.
set -eu
directory=$1
shift
# In this host's own view of the file system only.
mount --bind "$directory/ssh" /etc/ssh
mkdir -p /run/sshd
/usr/sbin/sshd -f /etc/ssh/sshd_config
if [ "$NETLAB_HOST" != 0 ]; then
    until [ -e "$directory/ended" ]; do sleep 0.2; done
    exit 0
fi
code=0
"$@" || code=$?
touch "$directory/ended"
exit $code
