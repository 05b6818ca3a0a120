"""Short trainings with TF Privacy, to be observed."""

import os
import sys
import warnings
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))  # for what the tests share
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ.setdefault("OMP_NUM_THREADS", "1")

with warnings.catch_warnings():  # of libraries that were new when TensorFlow 2.15 was
    warnings.simplefilter("ignore")
    import tensorflow as tf
    import tensorflow_privacy  # noqa: F401

tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(1)
tf.get_logger().setLevel("ERROR")
# two devices, which only the test of several devices uses
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)


def pytest_configure(config):
    """Keras 2.15 is older than what it runs on."""
    config.addinivalue_line("filterwarnings", "ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def forget_models():
    yield
    tf.keras.backend.clear_session()
