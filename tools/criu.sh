#!/usr/bin/env bash
# Install CRIU 4.2 or newer, with which sessions are forked by freezing. Where this machine's distribution has none, Debian's own packages of a newer suite are
# unpacked into a folder of their own, with their C library: nothing of the system is replaced. Signatures are checked. To remove: rm -r /usr/local/lib/polarnode-criu /usr/local/sbin/criu
set -euo pipefail
suite=${SUITE:-forky}
folder=/usr/local/lib/polarnode-criu program=/usr/local/sbin/criu

say() { printf '· %s\n' "$*"; }
new_enough() { "$1" --version 2>/dev/null | awk '/^Version:/ { split($2, v, "."); ok = v[1] > 4 || (v[1] == 4 && v[2] >= 2) } END { exit !ok }'; }

[ "$(id -u)" = 0 ] || { echo "an administrator has to run this: freezing needs root" >&2; exit 1; }
if found=$(command -v criu) && new_enough "$found"; then
  say "$found is new enough"
  exit
fi
keys=/usr/share/keyrings/debian-archive-keyring.gpg
[ -e "$keys" ] || { echo "install the package debian-archive-keyring, or criu 4.2 from your distribution" >&2; exit 1; }
mirror=${MIRROR:-$(apt-get indextargets --format '$(REPO_URI)' 'Label: Debian' | sed -n 1p)} # this machine's own
[ -n "$mirror" ] || { echo "set MIRROR to the address of a mirror of Debian" >&2; exit 1; }
say "unpacking criu of Debian $suite below $folder"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/lists/partial "$work"/archives/partial
: >"$work/status"
echo "deb [signed-by=$keys] $mirror $suite main" >"$work/sources.list"
# proxies, and whether a mirror may be a copy of an earlier day, are this machine's own settings
cat >"$work/apt.conf" <<CONF
Dir::State "$work"; Dir::State::status "$work/status"; Dir::Cache "$work";
Dir::Etc::sourcelist "$work/sources.list"; Dir::Etc::sourceparts "/dev/null"; APT::Sandbox::User "root"; APT::Install-Recommends "false";
CONF
export APT_CONFIG=$work/apt.conf
apt-get update -qq
apt-get install -y -qq --download-only criu >/dev/null
rm -rf "$folder"
mkdir -p "$folder"
for package in "$work"/archives/*.deb; do dpkg-deb --extract "$package" "$folder"; done
loader=$(find "$folder/usr" -name 'ld-linux-*.so.*' -print -quit)
binary=$(find "$folder/usr" -name criu -type f -perm -u+x -print -quit)
libraries=$(dirname "$(find "$folder/usr" -name 'libc.so.6' -print -quit)")
printf '#!/bin/sh\nexec %s --library-path %s %s "$@"\n' "$loader" "$libraries" "$binary" >"$program"
chmod 755 "$program"
new_enough "$program" || { echo "$program does not start, or Debian $suite has an older one: set SUITE" >&2; exit 1; }
say "$("$program" --version | head -1): $program"
