"""One template, one stylesheet and charts for every HTML page: training, explanation, scores, benchmark, demo."""
