"""Words of messages."""

from megaswift.log import amount


def test_an_amount_is_said_in_the_singular_where_it_reads_one() -> None:
    assert [amount(1, "row"), amount(2000, "row"), amount(0, "row"), amount(1, "process"), amount(2, "process")] == [
        "1 row",
        "2,000 rows",
        "0 rows",
        "1 process",
        "2 processes",
    ]
    assert [amount(0.99999, "epoch", ".4g"), amount(0.5, "epoch", ".4g")] == ["1 epoch", "0.5 epochs"]
