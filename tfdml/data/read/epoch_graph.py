"""Passes over a data set as a graph of `tf.data`, which asks Python once for many batches.

Rows are fetched and parsed a span of batches at a time, and then cut into batches: most of the cost
of both is per call. Decoding and augmentation follow batch by batch, on all cores.
"""

from collections.abc import Callable

import numpy as np
import tensorflow as tf


def build_epochs(
    begin: Callable[[], np.ndarray],
    fetch: Callable[[int, int, int], tuple[np.ndarray, np.ndarray, np.ndarray]],
    end: Callable[[int], None],
    parse: Callable,
    finish: Callable,
) -> tf.data.Dataset:
    """Returns a dataset; each pass over it yields a worker's rows of one epoch, in batches.

    Args:
        begin: Function called when a pass begins; returns its epoch, its first sample, and its
            numbers of batches and spans, and this worker's rows in a batch: int64, `[5]`.
        fetch: Function of the epoch, the first sample and the number of a span; returns the span's
            records, weights and seeds, see `fetching.Fetched`.
        end: Function called with the epoch when its last batch has been taken.
        parse: Function that `parsing.parser` returned.
        finish: Function that `batch.finisher` returned.
    """

    # Python functions, called by the graph when it runs.
    def begin_pass(_):
        return begin()

    def fetch_span(epoch, first, number):
        return tuple(fetch(int(epoch), int(first), int(number)))

    def end_pass(epoch):
        end(int(epoch))
        return np.int64(0)

    @tf.autograph.experimental.do_not_convert
    def one_pass(bounds):
        epoch, first, steps, spans, own_rows = (bounds[i] for i in range(5))

        @tf.autograph.experimental.do_not_convert
        def fetched(number):
            values = tf.numpy_function(
                fetch_span, [epoch, first, number], (tf.string, tf.float32, tf.int64)
            )
            shapes = ([None], [None], [None, 2])
            return tuple(tf.ensure_shape(v, s) for v, s in zip(values, shapes, strict=True))

        @tf.autograph.experimental.do_not_convert
        def parsed(records, weights, seeds):
            return parse(records), weights, seeds

        @tf.autograph.experimental.do_not_convert
        def numbered(*span):
            batches = -(-tf.size(span[1], tf.int64) // own_rows)
            # `repeat` passes on the span itself with each number, not a copy.
            whole = tf.data.Dataset.from_tensors(span).repeat(batches)
            return tf.data.Dataset.zip(tf.data.Dataset.range(batches), whole)

        @tf.autograph.experimental.do_not_convert
        def finished(number, span):
            begin = number * own_rows
            rows = tf.nest.map_structure(lambda t: t[begin : begin + own_rows], span)
            return finish(*rows)

        @tf.autograph.experimental.do_not_convert
        def marked(step, batch):
            done = tf.cond(
                tf.equal(step, steps - 1),
                lambda: tf.numpy_function(end_pass, [epoch], tf.int64),
                lambda: tf.constant(0, tf.int64),
            )
            with tf.control_dependencies([done]):
                return tf.nest.map_structure(
                    lambda t: None if t is None else tf.identity(t), batch, expand_composites=True
                )

        return (
            tf.data.Dataset.range(spans)
            .map(fetched)
            .prefetch(1)
            .map(parsed)
            .prefetch(1)
            .flat_map(numbered)
            .map(finished, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
            .prefetch(tf.data.AUTOTUNE)
            # After all prefetching: the last batch has been taken, so the pass is over.
            .enumerate()
            .map(marked)
        )

    return (
        tf.data.Dataset.range(1)
        .map(lambda part: tf.ensure_shape(tf.numpy_function(begin_pass, [part], tf.int64), [5]))
        .flat_map(one_pass)
    )
