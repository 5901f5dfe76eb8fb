"""Results that the paper prints (arXiv 2512.04784 v2), copied for comparison. None of them was measured here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

PAPER = "arXiv 2512.04784"

Rows = Mapping[str, Sequence[float | None]]

EDIT_REWARD_BENCH: Rows = {
    "GPT-4.1": (0.673, 0.602, 0.705),
    "GPT-5": (0.777, 0.669, 0.755),
    "Gemini 2.5 Pro": (0.703, 0.560, 0.722),
    "Qwen2.5-VL-7B": (0.458, 0.325, 0.432),
    "Qwen2.5-VL-32B": (0.498, 0.376, 0.563),
    "Qwen2.5-VL-72B": (0.540, 0.435, 0.621),
    "EditScore-7B": (0.592, 0.591, 0.659),
    "EditScore-32B": (0.638, 0.556, 0.680),
    "EditScore-72B": (0.635, 0.586, 0.703),
    "PaCo-Reward-7B-Fast": (0.748, 0.697, 0.728),
    "PaCo-Reward-7B": (0.777, 0.709, 0.751),
}
"""Tab. 1: prompt following, consistency, overall. Whether ties count is not said."""

CONSISTENCY_RANK: Rows = {
    "CLIP-I": (0.394, 0.178, 0.206, 0.475),
    "DreamSim": (0.403, 0.184, 0.214, 0.493),
    "InternVL3.5-8B": (0.359, 0.149, 0.176, 0.420),
    "Qwen2.5-VL-7B": (0.344, 0.118, 0.138, 0.401),
    "PaCo-Reward-7B-Fast": (0.441, 0.240, 0.278, 0.544),
    "PaCo-Reward-7B": (0.449, 0.250, 0.288, 0.557),
}
"""Tab. 2: accuracy, Kendall's τ and Spearman's ρ (of order lists), T1B1."""

T2IS: Rows = {
    "GPT-4o": (0.445, 0.663, 0.683, 0.693, 0.400, 0.463, 0.383, 0.501),
    "Gemini 2.0 Flash": (0.430, 0.738, 0.747, 0.743, 0.428, 0.383, 0.392, 0.509),
    "AutoT2IS + GPT-4o": (0.567, 0.754, 0.761, 0.763, 0.441, 0.520, 0.416, 0.571),
    "Seedream 4.0": (0.551, 0.813, 0.800, 0.805, 0.486, 0.479, 0.458, 0.589),
    "Gemini & SD3": (0.500, 0.796, 0.794, 0.789, 0.287, 0.244, 0.320, 0.480),
    "Gemini & PixArt": (0.447, 0.743, 0.765, 0.747, 0.206, 0.279, 0.268, 0.440),
    "Gemini & Hunyuan": (0.410, 0.758, 0.774, 0.765, 0.197, 0.276, 0.271, 0.436),
    "Gemini & FLUX.1-dev": (0.533, 0.791, 0.790, 0.786, 0.249, 0.302, 0.328, 0.490),
    "AutoT2IS": (0.520, 0.729, 0.756, 0.743, 0.359, 0.414, 0.356, 0.515),
    "FLUX.1-dev + PaCo-GRPO": (0.555, 0.721, 0.732, 0.731, 0.508, 0.549, 0.422, 0.576),
}
"""Tab. 3 with Qwen2.5-VL-7B as the judge: aesthetics; entity, attribute, relation; identity, style, logic; average."""

T2IS_GEMMA: Rows = {
    "GPT-4o": (0.792, 0.795, 0.840, 0.697),
    "Gemini 2.0 Flash": (0.750, 0.739, 0.793, 0.673),
    "AutoT2IS + GPT-4o": (0.806, 0.825, 0.860, 0.754),
    "Seedream 4.0": (0.809, 0.763, 0.862, 0.758),
    "Gemini & SD3": (0.640, 0.621, 0.755, 0.648),
    "Gemini & PixArt": (0.615, 0.638, 0.737, 0.617),
    "Gemini & Hunyuan": (0.605, 0.622, 0.741, 0.615),
    "Gemini & FLUX.1-dev": (0.636, 0.619, 0.754, 0.659),
    "AutoT2IS": (0.723, 0.737, 0.794, 0.686),
    "FLUX.1-dev + PaCo-GRPO": (0.837, 0.867, 0.859, 0.757),
}
"""Tab. 3 with Gemma-3-4B as the judge: identity, style, logic; average."""

_NONE = (None, None, None)

GEDIT: Rows = {
    "SeedEdit 3.0": (7.396, 7.899, 7.137, 7.222, 7.885, 6.983, 7.370, 7.870, 7.105, 7.195, 7.851, 6.942),
    "GPT-Image-1": (7.867, 8.097, 7.590, 7.743, 8.133, 7.494, 7.840, 8.075, 7.560, 7.708, 8.095, 7.451),
    "OmniGen": (6.037, 5.856, 5.154, 5.879, 5.871, 5.005, 6.015, 5.830, 5.122, 5.850, 5.845, 4.976),
    "OmniGen2": (*_NONE, 6.72, 7.20, 6.28, *_NONE, *_NONE),
    "OmniGen2 + EditScore": (*_NONE, 7.20, 7.46, 6.68, *_NONE, *_NONE),
    "Step1X-Edit": (7.289, 6.962, 6.618, 7.131, 6.998, 6.444, 7.464, 7.076, 6.779, 7.647, 7.398, 6.983),
    "Step1X-Edit + EditReward": (7.895, 6.946, 7.131, 7.854, 6.931, 7.086, 7.757, 7.024, 7.074, 7.658, 6.995, 7.001),
    "FLUX.1-Kontext-dev": (6.842, 6.888, 6.143, 6.599, 6.873, 5.956, *_NONE, *_NONE),
    "FLUX.1-Kontext-dev + PaCo-GRPO": (7.279, 7.036, 6.636, 7.033, 7.088, 6.469, *_NONE, *_NONE),
    "Qwen-Image-Edit": (7.746, 7.805, 7.307, 7.642, 7.807, 7.223, 7.727, 7.977, 7.344, 7.633, 7.938, 7.264),
    "Qwen-Image-Edit + PaCo-GRPO": (7.799, 8.053, 7.451, 7.693, 7.987, 7.325, 7.866, 8.125, 7.520, 7.678, 8.093, 7.366),
}
"""Tab. 4: SC, PQ and O of EN-I, EN, CN-I, CN."""
