"""The shell of patches: run in containers of any image that has git, sh and the usual tools.

Exit codes: 3 no repository, 4 no such base; anything else is git's own. The rule for whoever edits it: `git` is only ever called with our
own GIT_DIR, or for `apply` in a clean runtime, and every git setting that this machine's, the image's or the agent's files could hold is off.
"""

NO_REPOSITORY = "{} is no git repository"
NO_BASE = "the repository at {} does not hold the base {}"
TOO_LARGE = "more than {} MiB: name what does not belong to it in exclude_patterns"

# Our environment for git: no variable of the image's, no config but one file of ours, no prompt and no lock.
_CLEAN = """
set -u
for name in $(env | sed -n 's/^\\(GIT_[A-Za-z0-9_]*\\)=.*/\\1/p'); do unset "$name"; done
tmp=$(mktemp -d /tmp/polarnode-patch.XXXXXX) || exit 6
trap 'rm -rf "$tmp"' EXIT
export LC_ALL=C HOME="$tmp" XDG_CONFIG_HOME="$tmp" GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL="$tmp/.gitconfig" GIT_TERMINAL_PROMPT=0
printf '[safe]\\n\\tdirectory = *\\n[core]\\n\\tcompression = 1\\n\\thooksPath = /dev/null\\n\\tfsmonitor = false\\n' > "$tmp/.gitconfig"
"""

# A repository of ours for a worktree that is not. Files are taken and written as the bytes they are, whatever .gitattributes say: no end of
# line, encoding or filter is between a worktree and its patch, on neither side.
_OWN = """
GIT_WORK_TREE=$(pwd -P)
export GIT_DIR="$tmp/git" GIT_WORK_TREE GIT_INDEX_FILE="$tmp/index"
git init --quiet --template= --object-format="$format" >/dev/null 2>&1 || git init --quiet --template= >/dev/null || exit 6
mkdir -p "$GIT_DIR/info"
echo '* -text -ident !filter !working-tree-encoding !diff' > "$GIT_DIR/info/attributes"
"""

# $1 the folder, $2 a commit. What it holds, by content: a repository that the task itself makes has other commits in each container.
TREE = (
    _CLEAN
    + """
cd "$1" || exit 3
git rev-parse --verify HEAD >/dev/null || exit 3
git rev-parse --verify --quiet "$2^{tree}" || exit 4
"""
)

# $1 the folder, $2 the base's tree, $3 bytes of a patch, $4 KiB of an untracked file, then pathspecs. stdin: from the base to the start.
EXTRACT = (
    _CLEAN
    + """
cat > "$tmp/start"
cd "$1" 2>/dev/null || exit 3
base=$2 most=$3 largest=$4; shift 4

# Where a repository keeps its objects, found without asking its config: .git is a folder, or a file that names one.
objects() {
  g=$1
  [ -L "$g" ] && return 1
  if [ -f "$g" ]; then
    g=$(sed -n 's/^gitdir: //p' "$g")
    case $g in /*) ;; *) g=$(dirname "$1")/$g ;; esac
  fi
  if [ -f "$g/commondir" ]; then
    common=$(cat "$g/commondir")
    case $common in /*) g=$common ;; *) g=$g/$common ;; esac
  fi
  [ -d "$g/objects" ] && (cd "$g/objects" && pwd -P)
}
borrow() { found=$(objects "$1") || return 1; printf '%s\\n' "$found" >> "$GIT_DIR/objects/info/alternates"; }

format=sha1; [ ${#base} -eq 64 ] && format=sha256
"""
    + _OWN
    + """
borrow "$GIT_WORK_TREE/.git" || exit 3
git cat-file -e "$base^{tree}" 2>/dev/null || exit 4

# The start: the base, its submodules as the folders they are, and what the image had beside them.
git read-tree "$base" || exit 4
links() { git ls-files --stage | sed -n 's/^160000 \\([0-9a-f]*\\) 0\\t/\\1 /p'; }
for deep in 1 2 3 4; do
  links > "$tmp/links"
  [ -s "$tmp/links" ] || break
  while IFS= read -r line; do
    commit=${line%% *} path=${line#* }
    git update-index --force-remove -- "$path"
    if borrow "$GIT_WORK_TREE/$path/.git" && git cat-file -e "$commit^{commit}" 2>/dev/null; then git read-tree --prefix="$path/" "$commit"; fi
  done < "$tmp/links"
done
if [ -s "$tmp/start" ]; then git apply --cached --binary --whitespace=nowarn "$tmp/start" || exit 7; fi
began=$(git write-tree) || exit 7

# What is too large to be work, by path, as a line of our own info/exclude.
find . -path ./.git -prune -o -type f -size +"${largest}k" -print | while IFS= read -r path; do
  git ls-files --error-unmatch -- ":(literal)${path#./}" >/dev/null 2>&1 && continue
  git check-ignore --quiet -- "$path" 2>/dev/null && continue
  printf '%s\\n' "${path#.}" | sed 's/[][*?\\\\ ]/\\\\&/g' >> "$GIT_DIR/info/exclude"
  echo "left out, larger than $largest KiB: ${path#./}" >&2
done

# A repository inside this one is a folder like any other once the index has something in it.
find . -mindepth 2 -name .git -prune -print | while IFS= read -r path; do
  folder=${path#./}; folder=${folder%/.git}
  [ -n "$(git ls-files -- ":(literal)$folder" | head -n 1)" ] && continue
  first=$(find "./$folder" -name .git -prune -o \\( -type f -o -type l \\) -print | head -n 1)
  if [ -n "$first" ]; then git update-index --add -- "${first#./}"
  else printf '/%s\\n' "$folder" | sed 's/[][*?\\\\ ]/\\\\&/g' >> "$GIT_DIR/info/exclude"; fi
done
git add --all --ignore-errors . 2>"$tmp/said" || tail -n 20 "$tmp/said" >&2
links | while IFS= read -r line; do git update-index --force-remove -- "${line#* }"; done
ended=$(git write-tree) || exit 8

# Larger than it may be, a file of this shell's ends its writer; what was written by then is more than $most in every shell's units.
(ulimit -f $((most / 512 + 2)); exec git diff-tree -r -p --binary --full-index --no-renames --no-ext-diff --no-textconv --no-color \\
  "$began" "$ended" -- . "$@") > "$tmp/patch" 2>"$tmp/said"
code=$?
if [ "$code" -ne 0 ] && [ "$(wc -c < "$tmp/patch")" -le "$most" ]; then tail -n 5 "$tmp/said" >&2; exit 9; fi
head -c "$((most + 1))" "$tmp/patch"
"""
)

# $1 the folder, then pathspecs that the patch may not touch. stdin: the patch. Says last which of the two programs took it.
# What it may not touch is looked at before and after, because only what a patch does is what it does: it comes from a container of the agent's.
APPLY = (
    _CLEAN
    + """
cat > "$tmp/patch"
cd "$1" || exit 3
shift
format=sha1
kept_out() {
  [ $# -eq 0 ] || (
"""
    + _OWN
    + """
    rm -f "$GIT_INDEX_FILE"
    git ls-files -z --others -- "$@" | grep -zv '/$' | git update-index -z --add --stdin
    git write-tree
  ) 2>&1
}
before=$(kept_out "$@")
own() {
"""
    + _OWN
    + """
  git apply --binary --whitespace=nowarn "$tmp/patch"
}
if (own) 2>"$tmp/said"; then by=git
elif git apply --binary --whitespace=nowarn "$tmp/patch"; then by=git  # a patch that git made with the repository's attributes
elif patch --batch --forward --fuzz=5 -p1 -i "$tmp/patch"; then by=patch
else exit 1; fi
if [ "$before" != "$(kept_out "$@")" ]; then echo "it changes what is not the agent's to change" >&2; exit 5; fi
echo "$by"
"""
)

# $1 the folder, then folders in it. Says which of them are something else than a folder.
FOLDERS = """
cd "$1" || exit 3
shift
for path in "$@"; do
  if [ -L "$path" ] || { [ -e "$path" ] && [ ! -d "$path" ]; }; then printf '%s\\n' "$path"; fi
done
"""

# $1 the folder, $2 a command, $3 bytes: the command's output up to them, and its exit code.
KEPT_OUT = """
set -u
cd "$1" || exit 3
tmp=$(mktemp -d /tmp/polarnode-patch.XXXXXX) || exit 6
trap 'rm -rf "$tmp"' EXIT
shell=sh; command -v bash >/dev/null 2>&1 && shell=bash
"$shell" -c "$2" > "$tmp/patch"; code=$?
head -c "$3" "$tmp/patch"
exit "$code"
"""
