// Line charts as SVG text.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace scope::cli {

struct Series {
  std::string name;
  std::vector<std::pair<double, double>> points;  // x, y
};

struct Chart {
  std::string title, x_label, y_label, note;  // note: the settings, under the chart
  bool log_x = false, log_y = false;          // every value must then be > 0
  std::vector<Series> series;
};

std::string svg(const Chart& chart);

// The parts that other pictures share. `more`: attributes of the element.
std::string svg_open(double width, double height);
std::string svg_escaped(const std::string& text);
std::string svg_text(double x, double y, const char* anchor, const std::string& words, const char* more = "");

}  // namespace scope::cli
