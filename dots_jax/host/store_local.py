"""Reading whole objects of a local store without tensorstore's two copies.

An object of a `file://` store is an ordinary file that is only ever replaced as a whole, by renaming. So a reader may
open it itself: it then holds one version, whatever happens to the name, and needs no copy but the one into its own
memory.
"""

import threading
from pathlib import Path

import tensorstore as ts


class LocalObjects:
    """Objects of one directory. Safe to use from several threads; each has memory of its own, reused at each read.

    Args:
      directory: where the objects are.
      nbytes: size that objects should have; of a longer one, one byte more is read.
    """

    def __init__(self, directory: Path, nbytes: int):
        self._directory = directory
        self._nbytes = nbytes
        self._own = threading.local()

    def read(self, name: str) -> memoryview | None:
        """The object's bytes, valid until this thread's next read; None if there is none.

        Raises:
          OSError: it cannot be read.
        """
        memory = getattr(self._own, "memory", None)
        if memory is None:
            memory = self._own.memory = memoryview(bytearray(self._nbytes + 1))
        try:
            with open(self._directory / name, "rb", buffering=0) as file:
                size = 0
                while size < len(memory) and (count := file.readinto(memory[size:])):
                    size += count
        except FileNotFoundError:
            return None
        return memory[:size]


def local_objects(kv: ts.KvStore, nbytes: int) -> LocalObjects | None:
    """A reader for a store on local files; None for any other."""
    spec = kv.spec().to_json()
    return LocalObjects(Path(spec["path"]), nbytes) if spec["driver"] == "file" else None
