// Lays panels and histograms out; base64 and colours for them.
#include "picture.h"

#include <fmt/format.h>

#include <algorithm>

#include "plot.h"

namespace scope::cli {

namespace {

constexpr double kMargin = 16, kGap = 6, kName = 92;
constexpr const char* kTitleStyle = "font-size=\"15\" font-weight=\"bold\"";
constexpr const char* kSmall = "font-size=\"10\" fill=\"#666666\"";

// Ten that are easily told apart, then lighter ones of the same hues.
constexpr Colour kClusters[] = {{38, 84, 124},   {239, 71, 111},  {255, 196, 61},  {6, 160, 116},   {122, 81, 149},
                                {247, 127, 0},   {72, 191, 227},  {128, 92, 60},   {166, 206, 57},  {90, 90, 98},
                                {131, 168, 201}, {248, 167, 188}, {255, 228, 163}, {134, 208, 184}, {189, 166, 205},
                                {252, 195, 132}, {170, 224, 241}, {196, 174, 154}, {214, 233, 164}, {180, 180, 186}};
static_assert(std::size(kClusters) == kMostColours);
constexpr Colour kRamp[] = {{13, 8, 48}, {62, 32, 120}, {150, 47, 110}, {226, 96, 66}, {250, 174, 70}, {252, 250, 200}};

double widest(const PanelSection& section) {
  return section.rows.empty() || section.rows[0].panels.empty() ? 0
                                                                : static_cast<double>(section.rows[0].panels[0].image.width);
}
double tallest(const PanelSection& section) {
  return section.rows.empty() || section.rows[0].panels.empty()
             ? 0
             : static_cast<double>(section.rows[0].panels[0].image.height);
}

std::string panel_svg(const Panel& panel, double x, double y) {
  std::string out = fmt::format("<image x=\"{:.0f}\" y=\"{:.0f}\" width=\"{}\" height=\"{}\" href=\"{}\"/>\n", x, y,
                                panel.image.width, panel.image.height, data_uri(panel.image));
  if (panel.marked) {
    out +=
        fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"7\" fill=\"none\" stroke=\"#00e5ff\" stroke-width=\"2.5\"/>\n",
                    x + panel.x, y + panel.y);
  }
  return out;
}

constexpr int64_t kBins = 24;
constexpr double kBarsWidth = 250, kBarsHeight = 46;

// Bars over [low, high] in a box whose corner is x, y.
std::string bars_svg(const Histogram& histogram, double low, double high, double x, double y) {
  std::vector<int64_t> bins(kBins, 0);
  for (const double value : histogram.values) {
    ++bins[std::clamp(static_cast<int64_t>((value - low) / (high - low) * kBins), int64_t{0}, kBins - 1)];
  }
  const auto most = static_cast<double>(std::max<int64_t>(1, *std::max_element(bins.begin(), bins.end())));
  std::string out = fmt::format("<line x1=\"{0:.1f}\" y1=\"{2:.1f}\" x2=\"{1:.1f}\" y2=\"{2:.1f}\" stroke=\"#999999\"/>\n",
                                x, x + kBarsWidth, y + kBarsHeight);
  const double width = kBarsWidth / kBins;
  for (int64_t i = 0; i < kBins; ++i) {
    const double height = (kBarsHeight - 4) * static_cast<double>(bins[i]) / most;
    if (bins[i] == 0) continue;
    out += fmt::format("<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" fill=\"#1b6ca8\"/>\n",
                       x + static_cast<double>(i) * width + 0.5, y + kBarsHeight - height, width - 1, height);
  }
  if (!std::isnan(histogram.mark)) {
    const double at = x + kBarsWidth * (histogram.mark - low) / (high - low);
    out += fmt::format(
        "<line x1=\"{0:.1f}\" y1=\"{1:.1f}\" x2=\"{0:.1f}\" y2=\"{2:.1f}\" stroke=\"#d1495b\" stroke-width=\"2\"/>\n", at, y,
        y + kBarsHeight);
  }
  return out;
}

}  // namespace

Colour cluster_colour(int64_t cluster) { return kClusters[cluster % kMostColours]; }

Colour ramp_colour(double share) {
  constexpr int64_t kSteps = static_cast<int64_t>(std::size(kRamp)) - 1;
  const double at = std::clamp(share, 0.0, 1.0) * kSteps;
  const auto low = std::min(static_cast<int64_t>(at), kSteps - 1);
  Colour colour{};
  for (size_t c = 0; c < 3; ++c) {
    const double from = kRamp[low][c], to = kRamp[low + 1][c];
    colour[c] = static_cast<uint8_t>(std::lround(from + (at - static_cast<double>(low)) * (to - from)));
  }
  return colour;
}

io::Image map_image(int64_t height, int64_t width, int64_t scale, const std::function<Colour(int64_t, int64_t)>& colour) {
  io::Image image = io::make_image(height * scale, width * scale);
  for (int64_t y = 0; y < height; ++y) {
    for (int64_t x = 0; x < width; ++x) {
      const Colour c = colour(y, x);
      for (int64_t i = 0; i < scale * scale; ++i) {
        std::copy(c.begin(), c.end(), image.pixel(y * scale + i / scale, x * scale + i % scale));
      }
    }
  }
  return image;
}

std::string data_uri(const io::Image& image) {
  constexpr char kDigits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  const std::vector<std::byte> bytes = io::encode_png(image);
  std::string out = "data:image/png;base64,";
  out.reserve(out.size() + (bytes.size() + 2) / 3 * 4);
  for (size_t i = 0; i < bytes.size(); i += 3) {
    const size_t left = std::min<size_t>(3, bytes.size() - i);
    uint32_t word = 0;
    for (size_t j = 0; j < 3; ++j) word = word << 8 | (j < left ? static_cast<uint32_t>(bytes[i + j]) : 0u);
    for (size_t j = 0; j < 4; ++j) out += j <= left ? kDigits[word >> (18 - 6 * j) & 63] : '=';
  }
  return out;
}

std::string svg(const PanelPicture& picture) {
  double width = 0, height = kMargin + 24;
  for (const PanelSection& section : picture.sections) {
    width = std::max(width, kName + static_cast<double>(section.columns.size()) * (widest(section) + kGap));
    height += 44 + (section.details.empty() ? 0 : 14) + static_cast<double>(section.rows.size()) * (tallest(section) + kGap);
  }
  width = std::max(width + 2 * kMargin, 760.0);
  std::string out = svg_open(width, height + kMargin + 14 * static_cast<double>(picture.notes.size()));
  out += svg_text(kMargin, kMargin + 10, "start", picture.title, kTitleStyle);
  double y = kMargin + 24;
  for (const PanelSection& section : picture.sections) {
    out += svg_text(kMargin, y + 16, "start", section.title, "fill=\"#666666\"");
    y += 36;
    const double detail = section.details.empty() ? 0 : 14;
    for (size_t i = 0; i < section.columns.size(); ++i) {
      const double x = kMargin + kName + (static_cast<double>(i) + 0.5) * (widest(section) + kGap) - kGap / 2;
      out += svg_text(x, y, "middle", section.columns[i], "font-weight=\"bold\"");
      if (detail > 0) out += svg_text(x, y + detail, "middle", section.details[i], kSmall);
    }
    y += detail + 8;
    for (const PanelRow& row : section.rows) {
      out += svg_text(kMargin + kName - 10, y + tallest(section) / 2 + 4, "end", row.name);
      for (size_t i = 0; i < row.panels.size(); ++i) {
        out += panel_svg(row.panels[i], kMargin + kName + static_cast<double>(i) * (widest(section) + kGap), y);
      }
      y += tallest(section) + kGap;
    }
  }
  for (const std::string& note : picture.notes) out += svg_text(kMargin, y += 14, "start", note, kSmall);
  return out + "</svg>\n";
}

std::string svg(const HistogramPicture& picture) {
  constexpr double kColumn = kBarsWidth + 24, kRow = kBarsHeight + 10, kDetail = 210;
  const auto columns = static_cast<double>(picture.columns.size());
  const double width = 2 * kMargin + kName + columns * kColumn + kDetail;
  const double top = kMargin + 48, bottom = top + kRow * static_cast<double>(picture.rows.size());
  std::string out = svg_open(width, bottom + 36 + 14 * static_cast<double>(picture.notes.size()));
  out += svg_text(kMargin, kMargin + 10, "start", picture.title, kTitleStyle);
  for (size_t i = 0; i < picture.columns.size(); ++i) {
    const double x = kMargin + kName + static_cast<double>(i) * kColumn;
    double low = 0, high = 1;
    for (const HistogramRow& row : picture.rows) {
      for (const double value : row.columns[i].values) high = std::max(high, value);
      if (!std::isnan(row.columns[i].mark)) high = std::max(high, row.columns[i].mark);
    }
    out += svg_text(x, top - 10, "start", picture.columns[i], "font-weight=\"bold\"");
    for (size_t r = 0; r < picture.rows.size(); ++r) {
      out += bars_svg(picture.rows[r].columns[i], low, high, x, top + kRow * static_cast<double>(r));
    }
    out += svg_text(x, bottom + 8, "start", fmt::format("{:g}", low), kSmall);
    out += svg_text(x + kBarsWidth, bottom + 8, "end", fmt::format("{:g}", high), kSmall);
  }
  for (size_t r = 0; r < picture.rows.size(); ++r) {
    const double y = top + kRow * static_cast<double>(r) + kBarsHeight / 2 + 4;
    out += svg_text(kMargin + kName - 10, y, "end", picture.rows[r].name);
    out += svg_text(kMargin + kName + columns * kColumn, y, "start", picture.rows[r].detail, kSmall);
  }
  double y = bottom + 14;
  for (const std::string& note : picture.notes) out += svg_text(kMargin, y += 14, "start", note, kSmall);
  return out + "</svg>\n";
}

}  // namespace scope::cli
