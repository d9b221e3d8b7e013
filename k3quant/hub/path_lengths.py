"""Windows' limits on paths, checked before the first byte and not at 60 %.

Source: Microsoft, "Maximum Path Length Limitation": a path has at most 259 characters, a folder
that is created at most 247, a component at most 255, unless long paths are switched on.
"""

from collections.abc import Iterable, Iterator
from pathlib import PureWindowsPath

from k3quant.checkpoint.output_file import PARTIAL_SUFFIX
from k3quant.hub.partial import FRESH_SUFFIX, STATE_SUFFIX

MAX_PATH = 259
MAX_FOLDER = 247
MAX_COMPONENT = 255
_LONGEST_SUFFIX = PARTIAL_SUFFIX + STATE_SUFFIX + FRESH_SUFFIX


def too_long_paths(folder: str, names: Iterable[str]) -> Iterator[str]:
    """Yield a sentence for each path of a download that Windows would refuse.

    Args:
        folder: The absolute output folder, as Windows spells it.
        names: Files below it, with `/` between folders.
    """
    if folder.startswith("\\\\?\\"):  # the spelling that has no limit
        return
    root = PureWindowsPath(folder)
    for name in names:
        path = root / f"{name}{_LONGEST_SUFFIX}"
        length, above = len(str(path)), len(str(path.parent))
        if length > MAX_PATH:
            yield f"{name}: expected a path of at most {MAX_PATH} characters, got {length}"
        elif above > MAX_FOLDER:
            yield f"{name}: expected a folder of at most {MAX_FOLDER} characters, got {above}"
        elif len(path.name) > MAX_COMPONENT:
            yield f"{name}: expected a name of at most {MAX_COMPONENT}, got {len(path.name)}"
