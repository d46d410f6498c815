"""How the run of a program ends that has no result."""


class Undecided(Exception):
    """The program cannot be run exactly: a primitive, or a use of it, has no rule.

    Attributes:
        place: file and line of the equation; "" until the equation is known.
    """

    place = ""


class Wrong(Exception):
    """The program cannot run on several devices, as if only some of them enter a collective.

    Attributes:
        place: file and line of the equation; "" until the equation is known.
    """

    place = ""
