"""The control groups that limit a process's memory, in a made-up tree of them."""

from pathlib import Path

import pytest

from dots_jax.host.budget import _cgroup_available


def limit(group: Path, maximum: int | str, used: int, inactive_file: int = 0) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text(f"{maximum}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {inactive_file}\nactive_file 7\n")


@pytest.mark.parametrize(
    ("own", "parent", "expected"),
    [
        ((1000, 400, 50), ("max", 5000), 650),  # systemd's MemoryMax= of the service
        (("max", 400), (2000, 1900), 100),  # of its slice
        ((1000, 100), (2000, 1900), 100),
        ((1000, 950), (2000, 100), 50),
        ((1000, 1200), ("max", 0), 0),
        (("max", 400), ("max", 500), None),
    ],
)
def test_the_tightest_group_above_the_process_counts(tmp_path, own, parent, expected):
    root, membership = tmp_path / "cgroup", tmp_path / "membership"
    limit(root / "some.slice" / "some.service", *own)
    limit(root / "some.slice", *parent)  # the root itself has no such files outside a namespace
    limit(root / "other.slice", 1, 1)
    membership.write_text("3:cpu:/elsewhere\n0::/some.slice/some.service\n")
    assert _cgroup_available(root, membership) == expected


@pytest.mark.parametrize(
    "membership", ["0::/\n", "0::/../sibling\n", "0::/not/mounted/here\n", "1:memory:/old\n", None]
)
def test_inside_a_namespace_the_root_is_the_process_s_own_group(tmp_path, membership):
    root = tmp_path / "cgroup"
    limit(root, 1000, 400)
    limit(tmp_path / "sibling", 1, 1)
    if membership is not None:
        (tmp_path / "membership").write_text(membership)
    assert _cgroup_available(root, tmp_path / "membership") == 600


def test_no_groups_at_all_are_no_limit(tmp_path):
    assert _cgroup_available(tmp_path / "nothing", tmp_path / "membership") is None
