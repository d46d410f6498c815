"""What a check finds in a program, and the error that lists it."""

import dataclasses

from shardlib.parsing import MAY_BE_RIGHT, ShardError

WRONG = "wrong: it does not compute what one device computes"
NOT_DECIDED = MAY_BE_RIGHT
"""The form of a program that was traced as a run executes it."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """What is wrong with a program. `text` has the line, the problem and a remedy."""

    text: str
    is_wrong: bool = False
    """True: it computes something else than one device. False: this could not be decided."""

    def __str__(self) -> str:
        return self.text


def _place_and_remedy(finding: Finding) -> tuple[str, str]:
    return finding.text.partition(": ")[0], finding.text.rpartition("\n")[2]


def raise_for(found: list[Finding], shown: int | None = None, wrong: str = WRONG) -> None:
    """Raises ShardError if anything was found.

    The error has the verdict, `wrong` if a finding is, and the first `shown` findings (None: all),
    of which one is kept for each place and remedy.
    """
    if found:
        is_wrong = any(finding.is_wrong for finding in found)
        found = list({_place_and_remedy(finding): finding for finding in reversed(found)}.values())[
            ::-1
        ]
        more = (
            [f"… and {len(found) - shown} more"] if shown is not None and len(found) > shown else []
        )
        raise ShardError(
            "\n".join([*map(str, found[:shown]), *more]),
            context=wrong if is_wrong else NOT_DECIDED,
            place="",
        )
