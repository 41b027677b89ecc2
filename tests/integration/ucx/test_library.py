from pathlib import Path

import pytest

from kvservice.native import ucx
from tests.integration.ucx.peers import run_python

SYSTEM_ABSENT = 77


def test_a_choice_becomes_a_path(tmp_path):
    """Each choice is the package's file, the loader's name, or the file that was named."""
    named = tmp_path / "libucp.so.0"
    named.touch()
    assert ucx.find_library("system") == "libucp.so.0"
    assert ucx.find_library(str(named)) == str(named)
    automatic = ucx.find_library()
    assert automatic == "libucp.so.0" or Path(automatic).is_file()
    if automatic != "libucp.so.0":
        assert ucx.find_library("wheel") == automatic


@pytest.mark.parametrize("choice", ["", "libucp.so.0", "newest", "/no/such/libucp.so.0"])
def test_a_wrong_choice_is_refused(choice):
    """Nothing is guessed, and nothing relative is loaded."""
    with pytest.raises(ucx.UcxUnavailableError, match="UCX library"):
        ucx.find_library(choice)
    assert not ucx.is_available(choice)


def test_the_package_is_named_where_it_is_missing(monkeypatch):
    """The message says what to install; `auto` then means the system's."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ucx.UcxUnavailableError, match="libucx-cu12"):
        ucx.find_library("wheel")
    assert ucx.find_library("auto") == "libucp.so.0"


def test_the_loaded_library_is_told(library):
    """For `doctor`: which file, and which version; loading it again changes nothing."""
    ucx.load()
    assert Path(ucx.library_path()).is_absolute()
    assert tuple(int(part) for part in ucx.library_version().split("."))[:2] >= (1, 13)
    assert ucx.status_text(-25) == "Connection reset by remote peer"
    assert ucx.status_text(ucx.STATUS_OUTSIDE) == "Outside its segment"


def test_what_is_no_ucx_is_refused(library, tmp_path):
    """A file that is none, and a library without UCX's functions, in a process that has none yet."""
    broken = tmp_path / "libucp.so.0"
    broken.write_bytes(b"not a library")
    ended = run_python(f"""
        import ctypes.util
        from kvservice.native import ucx
        from kvservice.native.ucx import _ucx
        for path, words in (({str(broken)!r}, "libucp.so.0"), ("libc.so.6", "ucp_get_version")):
            try:
                _ucx.load(path)
                raise SystemExit(1)
            except ucx.UcxUnavailableError as refusal:
                assert words in str(refusal), refusal
        try:
            ucx.Worker({{}})
            raise SystemExit(2)
        except ucx.UcxUnavailableError as refusal:
            assert "load" in str(refusal)
        assert ucx.library_version() == ucx.library_path() == ""
        ucx.load()
        ucx.Worker({{"TLS": "tcp,self", "NET_DEVICES": "lo"}}).close()
    """)
    assert ended == ("", "", 0)


def test_a_process_uses_one_library(library, tmp_path):
    """A second file is refused before it is mapped: the two would share halves of each other."""
    copy = tmp_path / "libucp.so.0"
    copy.write_bytes(Path(ucx.library_path()).read_bytes())
    with pytest.raises(ucx.UcxUnavailableError, match="already"):
        ucx.load(str(copy))


def test_a_mixture_of_two_builds_is_refused(library, tmp_path):
    """A libucp takes whatever libucs the process has: that must be of its own folder."""
    copy = tmp_path / "libucp.so.0"
    copy.write_bytes(Path(ucx.library_path()).read_bytes())
    folder = Path(ucx.library_path()).parent
    ended = run_python(f"""
        import ctypes
        from kvservice.native import ucx
        for name in ("libucs.so.0", "libuct.so.0"):
            ctypes.CDLL({str(folder)!r} + "/" + name)
        try:
            ucx.load({str(copy)!r})
            raise SystemExit(1)
        except ucx.UcxUnavailableError as refusal:
            assert "another UCX" in str(refusal), refusal
    """)
    assert ended == ("", "", 0)


def test_where_the_extension_is_not_built_it_says_why():
    """Importing the package is harmless; every use names the reason."""
    ended = run_python("""
        import sys
        sys.modules["kvservice.native.ucx._ucx"] = None
        from kvservice.native import ucx
        assert not ucx.is_available()
        assert "headers" in ucx.why_not()
        for use in (ucx.load, lambda: ucx.Worker, lambda: ucx.drain_log):
            try:
                use()
                raise SystemExit(1)
            except ucx.UcxUnavailableError as refusal:
                assert "headers" in str(refusal)
        try:
            ucx.nonsense
            raise SystemExit(2)
        except AttributeError:
            pass
    """)
    assert ended == ("", "", 0)


@pytest.mark.parametrize("is_watched", [True, False])
def test_the_systems_library_works_too(start_peer, is_watched):
    """One build serves the system's UCX as well: two processes with it, get and put."""
    ended = run_python(f"""
        from kvservice.native import ucx
        try:
            ucx.load("system")
        except ucx.UcxUnavailableError as missing:
            print(missing)
            raise SystemExit({SYSTEM_ABSENT})
    """)
    if ended[2] == SYSTEM_ABSENT:
        pytest.skip(f"no UCX is installed with the system: {ended[1].strip()}")
    ended = run_python(f"""
        import numpy as np
        from kvservice.native import ucx
        from tests.integration.ucx.peers import CMA, TCP, Batch, RemotePeer, anonymous_memory, deadline_ns
        ucx.load("system")
        settings = TCP if {is_watched} else CMA
        peer = RemotePeer(settings, library="system")
        with ucx.Worker(settings) as worker:
            endpoint = worker.connect(peer.address, is_watched={is_watched})
            assert endpoint.wire(deadline_ns())
            memory = anonymous_memory(peer.length)
            batch = Batch.of_blocks(peer.attach(endpoint), memory, 1 << 16, 64)
            assert batch.run(worker, is_put=False) is ucx.Outcome.DONE
            assert np.array_equal(memory.view(np.uint64), np.arange(peer.length // 8, dtype=np.uint64))
            assert batch.run(worker, is_put=True) is ucx.Outcome.DONE
            peer.end()
            if endpoint.is_watched:
                assert batch.run(worker, is_put=False) is ucx.Outcome.LOST
    """)
    assert ended == ("", "", 0)
