from k3quant.eval.pace import Pace


def test_rates_are_of_the_layers_that_are_done():
    now = [0.0]
    pace = Pace(tokens=1000, layers=10, clock=lambda: now[0])
    assert pace.note(3, bytes_read=5 * 10**9) == "layer 3"
    now[0] = 2.0
    # Two of ten layers in two seconds: the tokens are through in ten.
    assert pace.note(5, bytes_read=8 * 10**9) == "layer 5, 1.50 GB/s, 100 tokens/s"
