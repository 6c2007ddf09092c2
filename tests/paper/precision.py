"""Tolerance of printed numbers: one unit of the last digit, or 1 % (parameters) and 2 % (multiply-adds)."""


def unit(printed: str) -> float:
    """One unit of the last printed digit: "4.4" -> 0.1, "25" -> 1."""
    return 10.0 ** -len(printed.partition(".")[2])


def agrees(ours: float, printed: str, relative: float) -> bool:
    """Within one unit of the last printed digit or `relative` of the number, whichever is wider."""
    return abs(ours - float(printed)) <= max(unit(printed), relative * float(printed))


def check_params(params: int, printed: str) -> None:
    assert agrees(params / 1e6, printed, 0.01), f"{params / 1e6:.3f}M against {printed}M"


def check_madds(madds: int, printed: str) -> None:
    assert agrees(madds / 1e9, printed, 0.02), f"{madds / 1e9:.3f}G against {printed}G"
