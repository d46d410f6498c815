"""Chips as data, held against what was published about them."""

import dataclasses

import pytest

from shardwright.cluster.chips import chip_of, known

pytestmark = pytest.mark.quick
NAMES = {"a100", "h100", "h200", "b200", "mi300x", "v4", "v5e", "v5p", "v6e", "v7x", "cpu"}


def as_measured(name):
    """The chip with its tables as they are, and the whole of its bandwidths."""
    return dataclasses.replace(chip_of(name), matmul_share=1.0, link_share=1.0)


@pytest.mark.parametrize("name", known())
def test_each_number_of_a_chip_has_a_source(name):
    chip = chip_of(name)
    numbers = [field.name for field in dataclasses.fields(chip) if field.type in (float, int)]
    assert not [number for number in numbers if len(chip.sources[number]) < 8]
    assert set(known()) >= NAMES


@pytest.mark.parametrize(
    ("m", "k", "n", "tflops"),
    [(4096, 4096, 4096, 780), (4096, 256, 4096, 399)],
)
def test_products_of_an_h100_take_what_xla_measured(m, k, n, tflops):
    seconds = as_measured("h100").matmul_s(1, m, k, n, "bf16")
    assert 2 * m * k * n / seconds == pytest.approx(tflops * 1e12, rel=0.002)


@pytest.mark.parametrize(
    ("op", "gb_per_s"), [("all_gather", 400), ("psum_scatter", 374), ("psum", 224)]
)
def test_collectives_of_8_h100_take_what_was_published(op, gb_per_s):
    seconds = as_measured("h100").collective_s(op, 2**31, {"p": 1, "r": 1, "d": 8, "t": 1}, ("d",))
    assert 2**31 / seconds == pytest.approx(gb_per_s * 1e9, rel=0.03)


def test_near_devices_share_their_network_cards():
    h100, gigabytes = as_measured("h100"), 8e9
    mesh = {"r": 8, "d": 8, "t": 1}
    # 64 devices on 8 hosts: one ring passes 63/64 of the bytes through each host's 8 cards of 50
    # GB/s, twice.
    slow = h100.collective_s("psum", gigabytes, mesh, ("r", "d"))
    assert slow == pytest.approx(2 * gigabytes * 63 / 64 / (8 * 50e9), rel=0.02)
    # Only r: the devices of a group are on 8 hosts, each with its own card.
    alone = h100.collective_s("psum", gigabytes, mesh, ("r",))
    assert alone == pytest.approx(2 * gigabytes * 7 / 8 / 50e9, rel=0.02)
    # With t=2 between them, four devices of each host are in the ring of 32.
    some = h100.collective_s("all_gather", gigabytes, {"d": 32, "t": 2}, ("d",))
    assert some == pytest.approx(gigabytes * 31 / 32 / (4 * 50e9), rel=0.02)
    assert h100.collective_s("ppermute", gigabytes, {"p": 2, "d": 8}, ("p",)) == pytest.approx(
        8 / 50, rel=0.02
    )
    assert h100.collective_s("ppermute", gigabytes, {"p": 2, "d": 4}, ("p",)) < 8 / 250


@pytest.mark.parametrize("hosts", [8, 256])
def test_gathers_over_many_hosts_take_their_steps(hosts):
    """As NCCL's src/graph/tuning.cc has it for rings with LL128: 4.0 µs to the next host, 1.9 µs to
    other devices.
    """
    size, n = 30e6, 8 * hosts
    seconds = chip_of("h100").collective_s("all_gather", size, {"r": 1, "d": n, "t": 1}, ("d",))
    steps = 14.0e-6 + (n - hosts) * 1.9e-6 + (hosts - 1) * 4.0e-6
    sent = size * (hosts - 1) / hosts / (8 * 0.8 * 50e9)
    assert seconds == pytest.approx(steps + sent, rel=0.15)


def test_a_ring_of_tpus_takes_what_the_scaling_book_says():
    v5e = as_measured("v5e")
    # All-gather of V bytes: V / (bandwidth of a link in both directions), which is 1e11; latency by
    # hops.
    assert v5e.collective_s("all_gather", 1e9, {"d": 16}, ("d",)) == pytest.approx(
        1e9 * 15 / 16 / 1e11 + 15e-6
    )
    assert v5e.collective_s("psum", 1e9, {"d": 16}, ("d",)) == pytest.approx(
        2e9 * 15 / 16 / 1e11 + 30e-6
    )
    assert v5e.collective_s("psum", 1e9, {"d": 1, "t": 8}, ("d",)) == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("like: h100\nnear: {value: -8, source: x}", "near is -8, which is not a positive number"),
        (
            "like: h100\npeak: {value: {f32: 1e12}, source: x}",
            "it must be a mapping of dtypes, bf16 among them",
        ),
        ("like: h1000", "like h1000, which is not a known chip: choose one of a100"),
        ("like: h100\nspeed: 3", "has an unknown speed"),
        (
            "like: h100\nproducts: holes.csv",
            "products is holes.csv, which is not a table of m,k,n,tflops",
        ),
        ("like: h100\ncollectives: holes.csv", "it has no column 'op'"),
        ("{", "is not a YAML mapping of names"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path, text, says):
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    (tmp_path / "holes.csv").write_text("m,k,n,tflops\n1,2,3,4\n5,6,7,8\n")
    with pytest.raises(ValueError, match=r"^[^\n]*$") as e:
        chip_of(str(path))
    assert says in str(e.value)
    assert str(path) in str(e.value)
