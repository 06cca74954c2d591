"""The registers of a target: what its sums have to fit into. They follow from the width of its vectors."""


def registers(bits: int) -> int:
    """How many vectors of so many bits a core holds: AVX2 has 16 registers, AVX-512 and NEON have 32."""
    return 16 if bits == 256 else 32
