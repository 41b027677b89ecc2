import pytest

from tests.integration.ucx.peers import run_python


def test_nothing_is_printed_and_the_process_is_left_alone(library):
    """Standard output, environment, signal handlers, working directory: as before; words are in drain_log."""
    ended = run_python("""
        import faulthandler, os, re, signal, sys
        from kvservice.native import ucx

        def caught():
            with open("/proc/self/status") as status:
                masks = re.findall(r"Sig(?:Cgt|Ign|Blk):(.*)", status.read())
            return [int(mask, 16) & 0x7FFFFFFF for mask in masks]  # the rest is the C library's own

        faulthandler.enable()
        signal.signal(signal.SIGHUP, lambda *_: print("hangup", file=sys.stderr))
        signal.signal(signal.SIGCHLD, lambda *_: None)
        before = dict(os.environ), caught(), os.getcwd()
        ucx.load()
        try:
            ucx.Worker({"TLS": "nonesuch"})
        except ucx.UcxError:
            pass
        lines = ucx.drain_log()
        assert any("nonesuch" in line for line in lines), lines
        assert not ucx.drain_log()
        worker = ucx.Worker({"TLS": "tcp,cma,self", "NET_DEVICES": "lo"})
        assert (dict(os.environ), caught(), os.getcwd()) == before
        os.kill(os.getpid(), signal.SIGHUP)
        worker.close()
    """)
    assert ended == ("hangup\n", "", 0)


def test_the_log_keeps_its_newest_lines(library):
    """It is bounded, and says how many lines are missing."""
    ended = run_python("""
        from kvservice.native import ucx
        ucx.load()
        for number in range(ucx.LOG_LINES + 10):
            try:
                ucx.Worker({"TLS": "none%d" % number})
            except ucx.UcxError:
                pass
        lines = ucx.drain_log()
        assert len(lines) == ucx.LOG_LINES + 1, len(lines)
        assert lines[0].endswith("lines before these were lost"), lines[0]
    """)
    assert ended == ("", "", 0)


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("", id="all open"),
        pytest.param(
            "threading.Thread(target=worker.serve, args=(os.pipe()[0],), daemon=True).start()", id="serving"
        ),
        pytest.param("del segment; del endpoint; worker.close()", id="closed"),
        pytest.param("os.kill(os.getpid(), signal.SIGINT)", id="interrupted"),
    ],
)
def test_the_interpreter_ends_well(library, code):
    """However a process leaves its UCX things, it ends with its own code and without a word."""
    ended = run_python(f"""
        import os, signal, threading, warnings
        from kvservice.native import ucx
        warnings.simplefilter("ignore", ResourceWarning)
        ucx.load()
        worker = ucx.Worker({{"TLS": "tcp,cma,self", "NET_DEVICES": "lo"}})
        memory = bytearray(4096)
        registration = worker.register(id(memory), 8)
        endpoint = worker.connect(worker.address, is_watched=True)
        segment = endpoint.attach(registration.rkey, registration.address, 8)
        try:
            {code or "pass"}
        except KeyboardInterrupt:
            pass
    """)
    assert ended == ("", "", 0)


def test_a_signal_handler_runs_while_the_main_thread_serves(library):
    """A server in the main thread can be interrupted like any other call."""
    ended = run_python("""
        import os, signal, threading
        from kvservice.native import ucx
        ucx.load()
        with ucx.Worker({"TLS": "tcp,self", "NET_DEVICES": "lo"}) as worker:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            try:
                worker.serve(os.pipe()[0])
            except KeyboardInterrupt:
                raise SystemExit(7)
    """)
    assert ended == ("", "", 7)


def test_a_forked_child_is_refused_and_the_parent_goes_on(library):
    """UCX's threads and descriptors are the parent's; a child that used them would take its bytes."""
    ended = run_python("""
        import os, sys
        from kvservice.native import ucx
        ucx.load()
        worker = ucx.Worker({"TLS": "tcp,self", "NET_DEVICES": "lo"})
        memory = bytearray(4096)
        registration = worker.register(id(memory), 8)
        endpoint = worker.connect(worker.address, is_watched=False)
        segment = endpoint.attach(registration.rkey, registration.address, 8)
        child = os.fork()
        if child == 0:
            refused = 0
            uses = (
                worker.progress,
                lambda: worker.serve(0),
                lambda: worker.register(id(memory), 8),
                lambda: worker.connect(worker.address, is_watched=True),
                lambda: endpoint.attach(registration.rkey, registration.address, 8),
                lambda: endpoint.wire(0),
            )
            for use in uses:
                try:
                    use()
                except ucx.UcxError as refusal:
                    refused += "forked" in str(refusal)
            segment.close(), endpoint.close(), registration.close(), worker.close()
            del segment, endpoint, registration, worker
            os._exit(0 if refused == len(uses) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        worker.progress()
        worker.close()
        child = os.fork()  # and one that opens its own is as good as any
        if child == 0:
            ucx.load()
            ucx.Worker({"TLS": "tcp,self", "NET_DEVICES": "lo"}).close()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    """)
    assert ended == ("", "", 0)
