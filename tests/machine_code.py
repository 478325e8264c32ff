"""Compares the machine code of CUDA kernels before and after a change, for every architecture and without a GPU.

A change that only moves code must leave the instructions as they were. So this compiles kernels of the grids of the
offline tests, keeps a digest of each one's code sections, and lists the kernels whose code differs.

    python tests/machine_code.py write before.json     # on the old commit
    python tests/machine_code.py write after.json      # on the new one
    python tests/machine_code.py compare before.json after.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import test_cuda_families_offline as families
import test_cuda_kernels_offline as norms
from covering import covering, factors
from cuda_spills import Kernel

from kernel_fusion.backends.cuda import planner
from kernel_fusion.backends.cuda.compile import compile_source
from kernel_fusion.backends.cuda.device import KNOWN_DEVICES

_GRIDS: dict[str, Callable[[int], Iterator[Kernel]]] = {
    "norms": norms._norms,
    "staged": norms._staged_norms,
    "codes": norms._norms_with_codes,
    "groups": lambda _: families._group_norm_kernels(),
    "pointwise": lambda _: families._pointwise_kernels(),
    "reductions": lambda _: families._reduce_kernels(),
    "rotary": lambda _: families._rotary_kernels(),
    "quantize": lambda _: families._quantize_kernels(),
    "softmax": lambda _: families._softmax_kernels(),
    "token_logprob": lambda _: families._token_logprob_kernels(),
}


def code_of(cubin: bytes) -> bytes:
    """The code sections of an ELF file, in order of their names."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    names = headers[names_at][4]

    def name(header: tuple[int, ...]) -> bytes:
        return cubin[names + header[0] : cubin.index(b"\0", names + header[0])]

    sections = {name(header): cubin[header[4] : header[4] + header[5]] for header in headers if header[5]}
    return b"".join(code for key, code in sorted(sections.items()) if key.startswith(b".text."))


def digests(grids: list[str], archs: list[int], strength: int) -> Iterator[tuple[str, str]]:
    """Each kernel's description and the digest of its code, for few kernels with all combinations of `strength`."""
    for grid in grids:
        for arch in archs:
            kernels = list(dict.fromkeys(_GRIDS[grid](arch)))
            planned = [planner.plan_for(*kernel, KNOWN_DEVICES[arch]) for kernel in kernels]
            rows = [
                factors({"spec": spec, "access": access, "plan": plan})
                for (spec, access), plan in zip(kernels, planned, strict=True)
            ]
            for index in covering(rows, strength):
                (spec, access), plan = kernels[index], planned[index]
                code = code_of(compile_source(planner.source_of(spec, access, plan).text(), arch)[0])
                yield f"{grid} sm_{arch} {spec} {access}", hashlib.sha256(code).hexdigest()


def compare(before: dict[str, str], after: dict[str, str]) -> int:
    """Print which kernels differ; the number of these, and of those that only one file has."""
    changed = sorted(key for key in before.keys() & after.keys() if before[key] != after[key])
    alone = before.keys() ^ after.keys()
    for key in changed:
        print("changed:", key)
    for key in sorted(alone):
        print("in one file only:", key)
    print(f"{len(before.keys() & after.keys())} kernels in both:", dict(Counter(k.split()[0] for k in before)))
    print(f"{len(changed)} changed, {len(alone)} in one file only")
    return len(changed) + len(alone)


def main() -> int:
    """Write or compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    write = commands.add_parser("write")
    write.add_argument("file", type=Path)
    write.add_argument("--grids", nargs="+", choices=list(_GRIDS), default=list(_GRIDS))
    write.add_argument("--archs", nargs="+", type=int, default=list(KNOWN_DEVICES))
    write.add_argument("--strength", type=int, default=1, help="of the covering array of kernels")
    both = commands.add_parser("compare")
    both.add_argument("before", type=Path)
    both.add_argument("after", type=Path)
    args = parser.parse_args()
    if args.command == "write":
        args.file.write_text(json.dumps(dict(digests(args.grids, args.archs, args.strength)), indent=1))
        return 0
    return min(compare(*(json.loads(path.read_text()) for path in (args.before, args.after))), 1)


if __name__ == "__main__":
    sys.exit(main())
