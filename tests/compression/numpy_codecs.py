"""Reference codecs in NumPy, from their papers' formulas: encoded bytes and decoded values."""

import numpy as np


def qsgd(rows: np.ndarray, bits: int, block: int, norm: str = "max") -> tuple[bytes, np.ndarray]:
    """QSGD with rounding to nearest; returns the bytes and the decoded values."""
    levels = np.float32(2 ** (bits - 1) - 1)
    payload, decoded = b"", np.empty_like(rows)
    for i, row in enumerate(rows):
        steps, codes = [], []
        for begin in range(0, len(row), block):
            part = row[begin : begin + block]
            size = np.abs(part).max() if norm == "max" else np.sqrt((part**2).sum())
            step = np.float32(size) * np.float32(1 / levels)
            code = np.rint(part * (np.float32(1) / step)) if step else np.zeros_like(part)
            code = np.clip(code, -levels, levels)
            steps.append(step)
            codes += [int(c + levels) for c in code]
            decoded[i, begin : begin + block] = code * step
        packed = bytearray()
        apart = block * bits // 8
        for begin in range(0, len(codes), block):
            for first in range(begin, begin + apart):
                byte = 0
                for position, code in enumerate(codes[first : begin + block : apart]):
                    byte |= code << (position * bits)
                packed.append(byte)
        payload += np.array(steps, np.float32).tobytes() + bytes(packed)
    return payload, decoded


def float16(rows: np.ndarray, block: int = 4096) -> np.ndarray:
    """Half precision scaled by a power of two per block; returns the decoded values."""
    decoded = np.empty_like(rows)
    for i, row in enumerate(rows):
        for begin in range(0, len(row), block):
            part = row[begin : begin + block].astype(np.float64)
            largest = np.abs(part).max()
            scale = 2.0 ** np.floor(np.log2(2.0**14 / largest)) if largest else 1.0
            decoded[i, begin : begin + block] = (part * scale).astype(np.float16) / scale
    return decoded


def one_bit(tile: np.ndarray) -> np.ndarray:
    """Signs with row and column sizes, in float64; returns the decoded values."""
    sizes = np.abs(tile.astype(np.float64))
    sums = sizes.sum(0)
    columns = np.maximum(np.rint(255 * sums / sums.max()), 1) if sums.any() else np.ones(len(sums))
    rows = sizes @ columns / (columns @ columns)
    return np.where(tile > 0, 1, -1) * np.outer(rows, columns)


def power_sgd(matrices: list[np.ndarray], start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One PowerSGD step over all ranks' matrices; returns the sum and its right factor."""
    left = np.linalg.qr(sum(m @ start for m in matrices))[0]
    right = sum(m.T @ left for m in matrices)
    return left @ right.T, right


class DeepGradient:
    """One rank of deep gradient compression in float32: momentum, gathered values, masks."""

    def __init__(self, shape, momentum: float, nesterov: bool = False, clip: float | None = None):
        self.speed = np.zeros(shape, "float32")
        self.gathered = np.zeros(shape, "float32")
        self.momentum, self.nesterov, self.clip = np.float32(momentum), nesterov, clip

    def gather(self, gradient: np.ndarray) -> np.ndarray:
        """Adds a gradient; returns all values that wait to be sent."""
        if self.clip is not None:
            gradient = gradient * min(1.0, self.clip / np.linalg.norm(gradient))
        self.speed = self.momentum * self.speed + gradient
        self.gathered += self.momentum * self.speed + gradient if self.nesterov else self.speed
        return self.gathered

    def send(self, indices: np.ndarray) -> np.ndarray:
        """Returns the values at some indices, and clears them and their momentum."""
        sent = np.zeros_like(self.gathered)
        sent.flat[indices] = self.gathered.flat[indices]
        self.gathered.flat[indices] = 0
        self.speed.flat[indices] = 0
        return sent
