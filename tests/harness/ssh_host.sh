#!/bin/bash
# One host of a network lab: ssh_host.sh DIRECTORY COMMAND...
#
# Every host serves ssh to the others, and runs DIRECTORY/services.sh if there is one; host 0 then
# runs the command, and its end is the end of all.
set -eu
directory=$1
shift
# In this host's own view of the file system only.
mount --bind "$directory/ssh" /etc/ssh
mkdir -p /run/sshd
/usr/sbin/sshd -f /etc/ssh/sshd_config
if [ -e "$directory/services.sh" ]; then . "$directory/services.sh"; fi
if [ "$NETLAB_HOST" != 0 ]; then
    until [ -e "$directory/ended" ]; do sleep 0.2; done
    exit 0
fi
code=0
"$@" || code=$?
touch "$directory/ended"
exit $code
