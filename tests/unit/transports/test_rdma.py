"""Which RDMA devices count."""

from kvservice.transports.rdma import rdma_devices, usable_devices


def test_devices_with_an_active_port_count(tmp_path):
    """A device whose cable is out moves nothing."""
    for device, states in {
        "mlx5_1": ["4: ACTIVE"],
        "mlx5_0": ["1: DOWN", "4: ACTIVE"],
        "old": ["1: DOWN"],
    }.items():
        for number, state in enumerate(states, start=1):
            port = tmp_path / device / "ports" / str(number)
            port.mkdir(parents=True)
            (port / "state").write_text(state + "\n")
    (tmp_path / "empty").mkdir()
    assert rdma_devices(tmp_path) == ("mlx5_0", "mlx5_1")
    assert rdma_devices(tmp_path / "nowhere") == ()


def test_without_verbs_no_device_is_usable():
    """The package of UCX was built without them, and this process has loaded no other."""
    assert usable_devices("") == ()
