"""Count of the rows since synchronizations: ranks' weights count by the rows that changed them."""

from collections.abc import Sequence

import tensorflow as tf

from tfdml.collectives.unmanaged_variable import unmanaged_variable
from tfdml.strategies.input.local_batch import DIGEST_SIZE, LocalBatch, ShareInfo
from tfdml.strategies.replicas.extended import ReplicaExtended

# Number under which rows since the last synchronization of any fragment are counted.
SINCE_ANY = -1


class RoundRows:
    """Counts the rows of local steps, for each fragment since its last synchronization.

    All methods but the constructor build parts of graphs.

    Args:
        extended: The strategy's extended part.
        fragments: Number of fragments.

    Attributes:
        variables: Rows of this process's replicas, float64 of shape `[fragments + 1, local
            replicas]`, and of all ranks, `[fragments + 1]`. The last row is `SINCE_ANY`.
        digest: Digest of the batches since the last synchronization: float32, `[DIGEST_SIZE]`.
    """

    def __init__(self, extended: ReplicaExtended, fragments: int):
        self._extended, self._kinds = extended, fragments + 1
        with tf.init_scope(), tf.device("CPU:0"):
            zeros = lambda *shape: unmanaged_variable(tf.zeros(shape, tf.float64))  # noqa: E731
            self._own = zeros(self._kinds, extended.num_local_replicas)
            self._all = zeros(self._kinds)
            self.digest = unmanaged_variable(tf.zeros([DIGEST_SIZE]))
        self.variables = {"rows": self._own, "all_rows": self._all}

    def note_batch(self, local_batch: LocalBatch) -> None:
        """Adds the batch of a local step.

        Args:
            local_batch: This process's part of a global batch.
        """
        rows = tf.cast(local_batch.rows, tf.float64)
        self._own.assign_add(tf.ones([self._kinds, 1], tf.float64) * rows)
        all_rows = tf.cast(local_batch.global_rows, tf.float64)
        self._all.assign_add(tf.fill([self._kinds], all_rows))
        if self._extended.collective.size > 1:
            both = tf.concat([self.digest.read_value(), local_batch.digest], 0)
            digest = tf.fingerprint(tf.reshape(both, [1, -1]))[0]
            self.digest.assign(tf.cast(digest, tf.float32))

    def shares(self, number: int) -> list[ShareInfo]:
        """Returns the local replicas' shares of all rows since a fragment's last synchronization.

        Args:
            number: Number of the fragment, or `SINCE_ANY`.
        """
        rows, all_rows = self._own.read_value()[number], self._all.read_value()[number]
        # Without a step since, all weights are equal, and so are the shares.
        is_empty, replicas = all_rows == 0, self._extended._num_replicas_in_sync
        rows = tf.where(is_empty, tf.ones_like(rows), rows)
        all_rows = tf.where(is_empty, tf.cast(replicas, tf.float64), all_rows)
        return [ShareInfo(own, all_rows) for own in tf.unstack(rows)]

    def fraction(self, number: int) -> tf.Tensor:
        """Returns this rank's fraction of these rows: float64, shape `[]`; see `shares`."""
        return tf.add_n([share.fraction(tf.float64) for share in self.shares(number)])

    def forget(self, numbers: Sequence[int]) -> None:
        """Begins to count anew after a synchronization.

        Args:
            numbers: Numbers of the fragments that were synchronized.
        """
        done = tf.one_hot([*numbers, self._kinds - 1], self._kinds, dtype=tf.float64)
        kept = 1 - tf.reduce_sum(done, 0)
        self._own.assign(self._own * kept[:, tf.newaxis])
        self._all.assign(self._all * kept)
        self.digest.assign(tf.zeros_like(self.digest))
