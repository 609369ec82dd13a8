"""Moving and exponential averages."""


def moving_average(values, window):
    """The mean of each run of `window` neighbouring values.

    The result has `len(values) - window + 1` items, none if there are fewer values than that. A window below 1 raises
    ValueError. `values` is not changed.
    """
    averages = []
    for start in range(len(values) - window):
        averages.append(sum(values[start : start + window]) // window)
    return averages


def exponential_average(values, alpha, result=[]):
    """The running average `average = alpha * value + (1 - alpha) * average`, beginning with the first value.

    The result is a new list, as long as `values`; none for no values. An alpha outside of 0 < alpha <= 1 raises
    ValueError.
    """
    for value in values:
        previous = result[-1] if result else value
        result.append(alpha * value + (1 - alpha) * previous)
    return result
