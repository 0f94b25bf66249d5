"""Names that mean more than one variable, and lambdas, whose text stands in several loops."""

from __future__ import annotations

import numpy as np

from .model import X, line, solid

CASES = [
    solid(
        "declarator_that_uses_an_earlier_one",
        "int a = int(i), b = simd_sum(a); y[i] = a + b;",
        want=lambda t: t.i + t.sum(t.i),
    ),
    solid(
        "declarator_that_uses_an_earlier_one_and_hides_another",
        """
        int a = 7;
        if (i < 6) {
          int a = int(i), b = simd_sum(a);
          y[i] = a + b;
        }
        y[i] += a;
        """,
        want=lambda t: np.where(t.i < 6, t.i + t.sum(t.i, t.i < 6), 0) + 7,
    ),
    solid(
        "counter_that_hides_a_variable",
        """
        int a = int(i);
        for (int a = 0; a < 3; ++a) { y[i] += simd_sum(a); }
        y[i] += a;
        """,
        want=lambda t: t.sum(3) + t.i,
    ),
    line(
        "input_is_hidden",
        """
        int acc = 0;
        { int x = int(i) * 2; acc += simd_sum(x); x += acc; acc += x; }
        y[i] = acc + x[i];
        """,
        want=lambda t: 2 * t.sum(2 * t.i) + 2 * t.i + X[t.i],
    ),
    line(
        "output_is_hidden",
        """
        int acc = 0;
        { int y[2] = {1, int(i)}; acc += simd_sum(y[1]); y[0] += acc; acc += y[0]; }
        y[i] = acc;
        """,
        want=lambda t: 2 * t.sum(t.i) + 1,
    ),
    line(
        "uniform_variable_is_hidden_in_a_loop",
        """
        int a = 3, acc = 0;
        for (int k = 0; k < a; ++k) {
          int a = int(i) + k;
          acc += simd_sum(a);
          a += acc;
          if (a > 50) continue;
          acc += a;
        }
        y[i] = acc * 10 + a;
        """,
    ),
    line(
        "names_like_those_of_the_generated_text",
        """
        int n = 3, m = 4, k = 5, v = 1, q = 2, c = 7;
        int w = simd_sum(n + int(i));
        y[i] = w + n + m + k + v + q + c;
        """,
        want=lambda t: t.sum(3 + t.i) + 22,
    ),
    solid(
        "lambda_whose_variable_is_hidden_where_it_is_called",
        """
        int acc = int(i);
        auto f = [&]() { return acc * 2; };
        int sum = simd_sum(1);
        {
          int acc = 77;
          sum += f() + acc;
          sum += simd_max(acc);
          acc += f();
          y[i] = acc + sum;
        }
        """,
        way="fibers (acc means another variable where f is called)",
        want=lambda t: 4 * t.i + 231 + t.sum(1),
    ),
    solid(
        "lambda_with_parameters_that_hide",
        """
        int a = int(l), b = 3;
        auto f = [&](int a) { int b = a * 2; return b + int(i); };
        int q = simd_sum(f(b));
        y[i] = q + f(a) + b;
        """,
        want=lambda t: t.sum(6 + t.i) + 2 * t.l + t.i + 3,
    ),
    line(
        "lambda_that_returns_early",
        """
        int acc = 1;
        auto f = [&](int v) { if (v > 3) return 1; acc += v; return 0; };
        int r = f(int(i));
        r += simd_sum(r);
        int more = f(2);
        acc += more;
        y[i] = acc * 100 + r;
        """,
        want=lambda t: np.where(t.i > 3, 301, (3 + t.i) * 100) + t.sum(t.i > 3),
    ),
    line(
        "lambda_in_a_loop",
        """
        int acc = 0;
        for (int k = 0; k < 3; ++k) {
          auto f = [&](int v) { if (v > 3) return v; return k; };
          acc += f(int(i)) + simd_sum(k);
        }
        y[i] = acc;
        """,
        want=lambda t: np.where(t.i > 3, 3 * t.i, 3) + t.sum(3),
    ),
    solid(
        "lambda_that_is_a_constant",
        """
        constexpr auto f = [](int v) { return v * 2 + 1; };
        int a = simd_sum(f(int(i)));
        y[i] = f(a) + f(int(l));
        """,
        want=lambda t: 2 * t.sum(2 * t.i + 1) + 1 + 2 * t.l + 1,
    ),
]
