"""How torch's CUDA allocator is to keep its memory, so that what is free is not in pieces that nothing fits into."""

from __future__ import annotations

from collections.abc import MutableMapping

_VARIABLE = "PYTORCH_ALLOC_CONF"
_ITS_OLDER_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def configure(environment: MutableMapping[str, str]) -> None:
    """Ask for expandable segments, unless the user has set the allocator up. To be called before torch is imported.

    Every step has another number of tokens, so its activations are of ever other sizes. In segments of fixed sizes they
    leave gaps: more is then reserved than the profiling pass saw allocated, of memory that the KV cache has by then.
    Segments that grow and shrink by mapping pages have no gaps. CUDA graphs go with them: torch keeps the graphs'
    private pools in ordinary segments (pytorch/pytorch#128068), or, where pytorch/pytorch#194767 is in, in expandable
    ones; nothing of theirs is freed, so nothing of theirs leaves a gap. A driver that cannot map pages makes torch warn
    and do without.
    """
    if not any(name in environment for name in (_VARIABLE, *_ITS_OLDER_NAMES)):
        environment[_VARIABLE] = "expandable_segments:True"
