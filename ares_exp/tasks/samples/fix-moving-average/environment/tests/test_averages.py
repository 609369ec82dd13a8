import unittest

from smoothing import exponential_average, moving_average


class MovingAverageTest(unittest.TestCase):
    def test_last_window_counts(self):
        self.assertEqual(moving_average([1, 2, 3, 4], 2), [1.5, 2.5, 3.5])

    def test_window_as_long_as_the_values(self):
        self.assertEqual(moving_average([2, 4, 6], 3), [4.0])


class ExponentialAverageTest(unittest.TestCase):
    def test_running_average(self):
        self.assertEqual(exponential_average([1, 3, 5], 0.5), [1, 2.0, 3.5])

    def test_calls_do_not_share_results(self):
        exponential_average([10, 20], 0.5)
        self.assertEqual(exponential_average([1], 0.5), [1])


if __name__ == "__main__":
    unittest.main()
