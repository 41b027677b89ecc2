"""What operators see is what the state holds."""

from kvservice.service.tier_report import tier_report
from tests.core_world import OTHER_ENGINE, SEGMENT_BYTES, SMALL_BYTES, World

PER_SEGMENT = SEGMENT_BYTES // SMALL_BYTES


def report_of(world):
    """Return the report of now."""
    report = tier_report(world.state, world.now_ns)
    (tier,) = report.tiers
    assert tier.slots_total_count == (
        tier.slots_free_count
        + tier.slots_reserved_count
        + tier.slots_committed_count
        + tier.slots_evicting_count
        + tier.slots_quarantined_count
    )
    return tier, report.owners


def test_an_empty_daemon_has_nothing_in_use():
    """Capacity is the arena's; a segment that nobody has holds no slots."""
    tier, owners = report_of(World())
    assert (tier.name, tier.capacity_bytes, tier.segments_total_count) == ("dram", 4 * SEGMENT_BYTES, 4)
    assert (tier.used_bytes, tier.slots_total_count, tier.segments_lent_count) == (0, 0, 0)
    assert not owners


def test_each_state_of_a_slot_is_counted():
    """Reserved, committed, evicting and quarantined slots each have their number, over all tenants."""
    world = World()
    one, two = world.attach(), world.attach("other", engine=OTHER_ENGINE)
    spaces, others = one.open(), two.open()
    one.put(spaces, [1, 2, 3])
    two.put(others, [1])
    one.acquire(spaces, [1])
    one.purge(one.open_answer().namespace_id)
    one.reserve(spaces, [4, 5])
    two.reserve(others, [6], ttl_s=1)
    world.advance(1)
    tier, owners = report_of(world)
    assert tier.slots_reserved_count == 2
    assert tier.slots_committed_count == 1
    assert tier.slots_evicting_count == 1
    assert tier.slots_quarantined_count == 1
    assert tier.used_bytes == 5 * SMALL_BYTES
    assert tier.slots_total_count == tier.segments_lent_count * PER_SEGMENT
    assert {owner.tenant for owner in owners} == {"acme", "other"}


def test_each_session_is_an_owner():
    """Who holds what, since when, and where it lives."""
    world = World()
    local = world.attach(name="the engine")
    spaces = local.open(SMALL_BYTES, 512)
    local.put(spaces, [1])
    local.reserve(spaces, [2, 3])
    local.acquire(spaces, [1])
    world.advance(2)
    world.attach("acme", is_local=False, name="far away")
    _, owners = report_of(world)
    by_name = {owner.client_name: owner for owner in owners}
    near, far = by_name["the engine"], by_name["far away"]
    assert (near.session_id, near.tenant, near.is_local, near.age_ms) == (
        local.session_id,
        "acme",
        True,
        2000,
    )
    assert (near.reservations_count, near.slots_reserved_count, near.leases_count) == (1, 4, 1)
    assert (far.is_local, far.age_ms, far.reservations_count, far.leases_count) == (False, 0, 0, 0)


def test_looking_changes_nothing():
    """A report twice is the same report."""
    world = World()
    client = world.attach()
    client.put(client.open(), [1, 2])
    assert tier_report(world.state, world.now_ns) == tier_report(world.state, world.now_ns)
    assert world.state.books.late_ends_count == 0
