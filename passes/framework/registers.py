"""Number of vector registers of a target, which limits how many sums a loop can keep. It follows from the vector width."""


def registers(bits: int) -> int:
    """Returns the number of registers for vectors of `bits` bits: 16 with AVX2, 32 with AVX-512 and NEON."""
    return 16 if bits == 256 else 32
