"""The calls of TensorFlow's guide "Distributed Input" (input.ipynb), in order.

The replicas' results of each batch are joined and recorded.
"""

import numpy as np
import tensorflow as tf

strategy = tf.distribute.MirroredStrategy([d.name for d in tf.config.list_logical_devices("CPU")])
outcome = {}


def rows_of(distributed):
    """Returns the replicas' rows, concatenated."""
    return np.concatenate([r.numpy() for r in strategy.experimental_local_results(distributed)])


def pairs(count):
    x = np.arange(count, dtype=np.float32)[:, None]
    return tf.data.Dataset.from_tensor_slices((x, x + 1))


def train_step(inputs):
    features, labels = inputs
    return labels - 0.3 * features


# Distributed datasets.
dist_dataset = strategy.experimental_distribute_dataset(pairs(100).batch(16))
outcome["loop"] = [rows_of(strategy.run(train_step, args=(x,))) for x in dist_dataset]

options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
sharded = strategy.experimental_distribute_dataset(pairs(64).batch(16).with_options(options))
outcome["sharded"] = [rows_of(x[0]) for x in sharded]


def dataset_fn(input_context):
    batch_size = input_context.get_per_replica_batch_size(16)
    dataset = pairs(64).shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
    return dataset.batch(batch_size).prefetch(2)


from_function = strategy.distribute_datasets_from_function(dataset_fn)
outcome["from_function"] = [rows_of(x[0]) for x in from_function]

# Distributed iterators.
dist_iterator = iter(dist_dataset)
outcome["iterator"] = [
    rows_of(strategy.run(train_step, args=(next(dist_iterator),))) for _ in range(3)
]

seen = tf.Variable(tf.zeros([0], tf.int64), shape=[None])
nine = strategy.experimental_distribute_dataset(tf.data.Dataset.range(9).batch(4))


@tf.function
def until_the_end(distributed_iterator):
    for _ in tf.range(5):
        optional_data = distributed_iterator.get_next_as_optional()
        if not optional_data.has_value():
            break
        results = strategy.run(lambda x: x, args=(optional_data.get_value(),))
        seen.assign(tf.concat([seen, *strategy.experimental_local_results(results)], 0))


until_the_end(iter(nine))
outcome["optional"] = seen.numpy()


# The element's specification.
@tf.function(input_signature=[dist_dataset.element_spec])
def doubled(per_replica_inputs):
    return strategy.run(lambda inputs: 2 * inputs[0], args=(per_replica_inputs,))


outcome["spec"] = [rows_of(doubled(x)) for x in dist_dataset]

# Preprocessing layers.
with strategy.scope():
    layer = tf.keras.layers.StringLookup(vocabulary=["a", "b", "c", "d", "f"])


def letters_fn(input_context):
    batch_size = input_context.get_per_replica_batch_size(4)
    letters = tf.data.Dataset.from_tensor_slices(["a", "c", "e", "b"]).repeat().batch(batch_size)
    letters = letters.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
    return letters.map(layer)


letters_iterator = iter(strategy.distribute_datasets_from_function(letters_fn))
outcome["letters"] = [rows_of(next(letters_iterator)) for _ in range(3)]

# Partial batches, with their indices.
numbered = tf.data.Dataset.range(22).enumerate().batch(6)
by_index = {}
for index, inputs in strategy.experimental_distribute_dataset(numbered):
    indices, outputs = strategy.run(lambda i, x: (i, 2 * x), args=(index, inputs))
    by_index.update(zip(rows_of(indices).tolist(), rows_of(outputs).tolist(), strict=True))
outcome["by_index"] = sorted(by_index.items())

# Values that are not a dataset's.
values = strategy.experimental_distribute_values_from_function(
    lambda context: tf.constant([context.replica_id_in_sync_group])
)
assert rows_of(strategy.run(lambda x: x, args=(values,))).tolist() == list(
    range(strategy.num_replicas_in_sync)
)


def numbers():
    number = 0
    while True:
        yield np.arange(4) + number
        number += 4


generated = tf.data.Dataset.from_generator(numbers, output_signature=tf.TensorSpec([4], tf.float32))
iterator = iter(strategy.experimental_distribute_dataset(generated))
outcome["generated"] = [
    rows_of(strategy.run(lambda x: x, args=(next(iterator),))) for _ in range(4)
]
