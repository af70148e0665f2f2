// Axes, ticks, lines and a legend: all that a comparison needs of a plotting library.
#include "plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "json.h"

namespace scope::cli {

namespace {

constexpr double kWidth = 760, kHeight = 420, kLeft = 70, kRight = 230, kTop = 40, kBottom = 70;
constexpr const char* kColours[] = {"#1b6ca8", "#d1495b", "#3a7d44", "#8e5ea2", "#e08e1b", "#4c9f9f", "#7a5c3e", "#555555"};

// One axis: values to positions, and where its ticks are.
struct Axis {
  double low = 0, high = 1, from = 0, to = 1;
  bool log = false;
  std::vector<double> ticks;

  Axis(std::vector<double> values, bool is_log, double start, double end) : from(start), to(end), log(is_log) {
    if (values.empty()) values = {0.1, 1};
    low = *std::min_element(values.begin(), values.end());
    high = *std::max_element(values.begin(), values.end());
    if (log) {
      make_log_ticks();
    } else {
      make_ticks();
    }
  }
  double at(double value) const {
    const double share = log ? std::log(value / low) / std::log(high / low) : (value - low) / (high - low);
    return from + share * (to - from);
  }

 private:
  void make_ticks() {
    const double span = high > low ? high - low : std::max(std::abs(high), 1.0);
    const double power = std::pow(10.0, std::floor(std::log10(span / 5)));
    double step = power;
    for (const double factor : {1.0, 2.0, 5.0, 10.0}) {
      step = factor * power;
      if (span / step <= 6) break;
    }
    low = std::floor(low / step) * step;
    high = std::max(std::ceil(high / step - 1e-9) * step, low + step);
    for (int i = 0; low + i * step <= high + 1e-9 * span; ++i) ticks.push_back(low + i * step);
  }
  // 1, 2 and 5 times powers of ten, ending outside the values.
  void make_log_ticks() {
    std::vector<double> all;
    const auto first_power = static_cast<int>(std::floor(std::log10(low))) - 1;
    const auto last_power = static_cast<int>(std::ceil(std::log10(high))) + 1;
    for (int power = first_power; power <= last_power; ++power) {
      for (const double factor : {1.0, 2.0, 5.0}) all.push_back(factor * std::pow(10.0, power));
    }
    const auto first = std::upper_bound(all.begin(), all.end(), low * (1 + 1e-9)) - 1;
    const auto last = std::lower_bound(first + 1, all.end(), high * (1 - 1e-9));
    ticks.assign(first, last + 1);
    low = ticks.front();
    high = ticks.back();
  }
};

}  // namespace

std::string svg_escaped(const std::string& text) {
  std::string out;
  for (const char c : utf8_text(text)) {
    if (c == '&') {
      out += "&amp;";
    } else if (c == '<') {
      out += "&lt;";
    } else {
      out += c;
    }
  }
  return out;
}

std::string svg_text(double x, double y, const char* anchor, const std::string& words, const char* more) {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\" {}>{}</text>\n", x, y, anchor, more,
                     svg_escaped(words));
}

std::string svg_open(double width, double height) {
  return fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1}\" viewBox=\"0 0 {0} {1}\" "
      "font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"{0}\" height=\"{1}\" fill=\"white\"/>\n",
      width, height);
}

std::string svg(const Chart& chart) {
  std::vector<double> xs, ys;
  for (const Series& series : chart.series) {
    for (const auto& [x, y] : series.points) xs.push_back(x), ys.push_back(y);
  }
  const Axis x(xs, chart.log_x, kLeft, kWidth - kRight), y(ys, chart.log_y, kHeight - kBottom, kTop);
  std::string out = svg_open(kWidth, kHeight);
  out += svg_text(kLeft, 22, "start", chart.title, "font-size=\"15\" font-weight=\"bold\"");
  const auto line = [&](double x1, double y1, double x2, double y2) {
    out +=
        fmt::format("<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"#dddddd\"/>\n", x1, y1, x2, y2);
  };
  for (const double tick : x.ticks) {
    line(x.at(tick), kTop, x.at(tick), kHeight - kBottom);
    out += svg_text(x.at(tick), kHeight - kBottom + 16, "middle", fmt::format("{:.4g}", tick));
  }
  for (const double tick : y.ticks) {
    line(kLeft, y.at(tick), kWidth - kRight, y.at(tick));
    out += svg_text(kLeft - 6, y.at(tick) + 4, "end", fmt::format("{:.4g}", tick));
  }
  out += svg_text((kLeft + kWidth - kRight) / 2, kHeight - kBottom + 34, "middle", chart.x_label);
  out += svg_text(16, (kTop + kHeight - kBottom) / 2, "middle", chart.y_label,
                  fmt::format("transform=\"rotate(-90 16 {:.1f})\"", (kTop + kHeight - kBottom) / 2).c_str());
  out += svg_text(10, kHeight - 12, "start", chart.note, "font-size=\"10\" fill=\"#666666\"");
  for (size_t i = 0; i < chart.series.size(); ++i) {
    const char* colour = kColours[i % std::size(kColours)];
    std::string points, dots;
    for (const auto& [px, py] : chart.series[i].points) {
      points += fmt::format("{:.1f},{:.1f} ", x.at(px), y.at(py));
      dots += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3\" fill=\"{}\"/>\n", x.at(px), y.at(py), colour);
    }
    out += fmt::format("<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"2\"/>\n{}", points, colour, dots);
    const double at = kTop + 12 + 18 * static_cast<double>(i);
    out += fmt::format("<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"14\" height=\"4\" fill=\"{}\"/>\n", kWidth - kRight + 14,
                       at - 6, colour);
    out += svg_text(kWidth - kRight + 34, at, "start", chart.series[i].name);
  }
  return out + "</svg>\n";
}

}  // namespace scope::cli
