// Maps over the frames of a video and rows of histograms, as SVG; a map's pixels are a PNG inside it.
#pragma once

#include <array>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "io/png.h"

namespace scope::cli {

using Colour = std::array<uint8_t, 3>;
Colour cluster_colour(int64_t cluster);  // kMostColours differ
Colour ramp_colour(double share);        // dark to light over [0, 1]
inline constexpr int64_t kMostColours = 20;

// `height` x `width` tokens, each a square of `scale` pixels.
io::Image map_image(int64_t height, int64_t width, int64_t scale, const std::function<Colour(int64_t, int64_t)>& colour);
std::string data_uri(const io::Image& image);

struct Panel {
  io::Image image;
  bool marked = false;  // a cyan circle at x, y
  double x = 0, y = 0;  // pixels of the image
};
struct PanelRow {
  std::string name;
  std::vector<Panel> panels;
};
struct PanelSection {
  std::string title;
  std::vector<std::string> columns, details;  // headings, and a smaller line under each
  std::vector<PanelRow> rows;                 // all panels of one size
};
struct PanelPicture {
  std::string title;
  std::vector<std::string> notes;
  std::vector<PanelSection> sections;
};
std::string svg(const PanelPicture& picture);

struct Histogram {
  std::vector<double> values;
  double mark = NAN;  // a line at this value
};
struct HistogramRow {
  std::string name, detail;
  std::vector<Histogram> columns;
};
struct HistogramPicture {
  std::string title;
  std::vector<std::string> notes, columns;
  std::vector<HistogramRow> rows;  // a column has one axis for all
};
std::string svg(const HistogramPicture& picture);

}  // namespace scope::cli
