"""The pictures of a sweep: what they are of, and what they say."""

from __future__ import annotations

from trial_ray.sweeps.outputs import plot_map

METRIC = "env_runners/success_rate"


def words(files) -> str:
    png, svg = files
    assert png.read_bytes()[:4] == b"\x89PNG"
    return svg.read_text(encoding="utf-8")


def grid():
    chosen = [(coefficient, alpha) for coefficient in (0.0, 0.02) for alpha in (0.5, 1.0)]
    return [
        ({"hindsight_coeff": coefficient, "clamp_alpha": alpha}, coefficient + alpha, 0.125)
        for coefficient, alpha in chosen
    ]


def test_a_grid_is_shown_as_cells_with_intervals(tmp_path):
    text = words(plot_map(grid(), METRIC, tmp_path / "map"))
    for part in ("λ (hindsight_coeff)", "α (clamp_alpha)", "success_rate", ">1.02<", ">± 0.12<", "95 % interval"):
        assert part in text


def test_what_forms_no_grid_has_no_map(tmp_path):
    points = [({"a": 10.0**-index, "b": index % 7 + 0.5}, index / 20, None) for index in range(20)]
    assert plot_map(points, METRIC, tmp_path / "none") == []
    assert plot_map([({"a": index, "view": "x"}, 0.5, None) for index in range(3)], METRIC, tmp_path / "none") == []
    assert plot_map([], METRIC, tmp_path / "none") == []
