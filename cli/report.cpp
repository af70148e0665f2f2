// scope report: clips side by side, with their quality, times and settings, as one page that fetches nothing.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "bounds.h"
#include "clip.h"
#include "cluster_maps.h"
#include "commands.h"
#include "input.h"
#include "json.h"
#include "outputs.h"
#include "terminal.h"

namespace scope::cli {

extern const std::string_view kReportPage;  // report_page.cpp.in

namespace {

constexpr int64_t kSheetSide = 4096;  // pixels; browsers hold images of 16,384 at most

struct ReportOptions {
  std::vector<std::string> clips, qkv;
  std::string output, title = "Dense and sparse, frame by frame";
  int64_t skip = 0, head = 0;
  double fps = 8;
  int threads = 0;
};

// What the page reads of a run.json is checked here, so that a page is either whole or not written.
void check_run(const Clip& clip) {
  const auto& run = clip.run;
  if (run.is_null()) return;
  const auto wrong = [&](const std::string& what) { fail(Status::format, "{}/run.json: {}", clip.path, what); };
  const auto number = [](const nlohmann::ordered_json& json, const char* key) {
    return json.is_object() && json.contains(key) && json[key].is_number();
  };
  const auto numbers = [](const nlohmann::ordered_json& json) {
    return json.is_array() && std::all_of(json.begin(), json.end(), [](const auto& x) { return x.is_number(); });
  };
  if (run.contains("grid") && (!numbers(run["grid"]) || run["grid"].empty())) wrong("grid is not a list of numbers");
  if (run.contains("settings") && !run["settings"].is_object()) wrong("settings is not an object");
  if (run.contains("seconds")) {
    for (const char* key : {"total", "dense_prefix", "sparse_attention", "selection", "rest"}) {
      if (!number(run["seconds"], key)) wrong(fmt::format("seconds has no number \"{}\"", key));
    }
  }
  if (!run.contains("layers")) return;
  const auto& steps = run["layers"];
  if (!steps.is_array() || steps.empty()) wrong("layers is not a list of steps");
  for (const auto& step : steps) {
    if (!step.is_array() || step.empty() || step.size() != steps[0].size())
      wrong("layers: a step is not a list of every layer");
    for (const auto& layer : step) {
      const bool whole = number(layer, "density") && layer.contains("dense") && layer["dense"].is_boolean() &&
                         layer.contains("k_head") && numbers(layer["k_head"]);
      if (!whole) wrong("layers: a layer has no density, dense or k_head");
      const bool heads = !layer.contains("head_density") ||
                         (numbers(layer["head_density"]) && layer["head_density"].size() == layer["k_head"].size());
      if (!heads) wrong("layers: head_density is not a number for each k_head");
    }
  }
}

// The mean over sparse calls; null where there was none.
nlohmann::ordered_json sparse_density(const nlohmann::ordered_json& run) {
  if (!run.is_object() || !run.contains("layers")) return nullptr;
  double sum = 0;
  int64_t calls = 0, all = 0;
  for (const auto& step : run["layers"]) {
    for (const auto& layer : step) {
      ++all;
      if (layer["dense"]) continue;
      sum += layer["density"].get<double>();
      ++calls;
    }
  }
  if (calls == 0) return all > 0 ? nlohmann::ordered_json(1.0) : nlohmann::ordered_json(nullptr);
  return sum / static_cast<double>(calls);
}

// How frames lie on the sheets of a clip: rows of `columns`, `per_sheet` on each.
struct Sheets {
  int64_t columns, per_sheet;
  Sheets(int64_t frames, int64_t width, int64_t height)
      : columns(std::min(frames, std::max<int64_t>(1, kSheetSide / width))),
        per_sheet(std::min(frames, columns * std::max<int64_t>(1, kSheetSide / height))) {}
};

std::vector<std::string> draw_sheets(const Clip& clip, const Sheets& layout, int64_t width, int64_t height) {
  std::vector<std::string> uris;
  const int64_t count = std::ssize(clip.frames);
  for (int64_t first = 0; first < count; first += layout.per_sheet) {
    const int64_t n = std::min(layout.per_sheet, count - first), columns = std::min(n, layout.columns);
    io::Image sheet = io::make_image((n + layout.columns - 1) / layout.columns * height, columns * width);
    for (int64_t i = 0; i < n; ++i) {
      const io::Image frame = io::read_png(clip.frames[first + i]);
      for (int64_t y = 0; y < height; ++y) {
        std::copy_n(frame.pixel(y, 0), width * 3, sheet.pixel(i / layout.columns * height + y, i % layout.columns * width));
      }
    }
    uris.push_back(data_uri(sheet));
  }
  return uris;
}

nlohmann::ordered_json cluster_json(const Context& context, const std::string& path, int64_t head) {
  InputFlags flags;
  flags.path = path;
  const Input input = flags.read("");
  input.check_measurable("--qkv");
  const Grid grid = video_grid(input, 0);
  constexpr int64_t kMapClusters = 10;
  require(grid_tokens(grid) >= kMapClusters, Status::shape, "{}: {} tokens, expected at least {} for as many clusters", path,
          grid_tokens(grid), kMapClusters);
  const std::vector<int64_t> frames = parse_frames("", grid[0], 5);
  const ClusterMaps maps = make_cluster_maps(context, one_head(input, head), grid, Settings{}, kMapClusters);
  nlohmann::ordered_json json{{"title", fmt::format("{}, head {}", std::filesystem::path(path).filename().string(), head)},
                              {"clusters", kMapClusters},
                              {"frames", frames}};
  const PanelSection section = cluster_section(maps, frames);
  for (size_t m = 0; m < section.rows.size(); ++m) {
    nlohmann::ordered_json row{{"name", section.rows[m].name}, {"shares", maps.shares[m]}};
    for (const Panel& panel : section.rows[m].panels) row["images"].push_back(data_uri(panel.image));
    json["rows"].push_back(row);
  }
  return json;
}

// NAME=FOLDER, or the folder alone.
Clip named_clip(const std::string& text) {
  const size_t equals = text.find('=');
  if (equals == std::string::npos || io::exists(text)) return open_clip(text);
  Clip clip = open_clip(text.substr(equals + 1));
  clip.name = text.substr(0, equals);
  return clip;
}

void run(const ReportOptions& options) {
  std::vector<Clip> clips;
  std::set<std::string> names;
  for (const std::string& text : options.clips) {
    Clip clip = named_clip(text);
    if (!names.insert(clip.name).second) clip.name = clip.path;
    check_run(clip);
    clips.push_back(std::move(clip));
  }
  require(options.skip == 0 || clips.size() > 1, Status::invalid_argument,
          "--skip: got {}, and there is no second clip to compare", options.skip);
  Outputs outputs;
  for (const Clip& clip : clips) clip.declare(outputs);
  for (const std::string& path : options.qkv) outputs.reads("--qkv", path);
  outputs.writes("--output", options.output);
  const Clip& reference = clips[0];
  const Context context(options.threads);
  auto progress = std::make_unique<Progress>(
      "report", std::ssize(reference.frames) * (std::ssize(clips) - 1) + std::ssize(clips) + std::ssize(options.qkv));
  // The comparisons come first: they refuse clips that do not fit.
  std::vector<nlohmann::ordered_json> qualities(clips.size());
  for (size_t i = 1; i < clips.size(); ++i) {
    qualities[i] = quality_json(
        compare_clips(*context.exec().pool, reference, clips[i], options.skip, [&] { progress->step(clips[i].name); }));
  }
  const io::Image first = io::read_png(reference.frames[0]);
  const Sheets layout(std::ssize(reference.frames), first.width, first.height);
  nlohmann::ordered_json data{{"version", version()},
                              {"title", options.title},
                              {"frames", reference.frames.size()},
                              {"width", first.width},
                              {"height", first.height},
                              {"fps", options.fps},
                              {"skip", options.skip},
                              {"columns", layout.columns},
                              {"per_sheet", layout.per_sheet},
                              {"runs", nlohmann::ordered_json::array()},
                              {"clusters", nlohmann::ordered_json::array()}};
  for (size_t i = 0; i < clips.size(); ++i) {
    data["runs"].push_back({{"name", clips[i].name},
                            {"density", sparse_density(clips[i].run)},
                            {"quality", qualities[i]},
                            {"run", clips[i].run},
                            {"sheets", draw_sheets(clips[i], layout, first.width, first.height)}});
    progress->step(clips[i].name);
  }
  for (const std::string& path : options.qkv) {
    data["clusters"].push_back(cluster_json(context, path, options.head));
    progress->step(path);
  }
  progress.reset();

  // "<" would let a name end the script that holds the JSON.
  std::string text = json_text(data, -1, true);
  for (size_t at = 0; (at = text.find('<', at)) != std::string::npos;) text.replace(at, 1, "\\u003c");
  std::string page(kReportPage);
  constexpr std::string_view kPlace = "/*DATA*/";
  page.replace(page.find(kPlace), kPlace.size(), text);
  write_text(outputs.open(options.output), page);
  outputs.place();

  fmt::print("{}: {} clips of {} frames, {:.1f} MB\n", options.output, clips.size(), reference.frames.size(),
             static_cast<double>(page.size()) / 1e6);
  if (clips.size() > 1) print_run_table(clips, qualities);
}

}  // namespace

void add_report(CLI::App& app) {
  auto options = std::make_shared<ReportOptions>();
  CLI::App* command = app.add_subcommand(
      "report",
      "Make one page of clips side by side: frames and their differences with a slider, PSNR by frame, time by part, "
      "density\n"
      "and k_head by layer and step, cluster maps, and every setting. A clip is a folder of PNG frames with the run.json "
      "that\n"
      "`scope generate` writes; the first is what the others are compared with. The page holds everything, losslessly, and\n"
      "fetches nothing.\n\n"
      "  scope generate --method dense -o dense && scope generate --method scope --target-density 0.2 -o scope\n"
      "  scope report dense scope -o report.html\n"
      "  scope report Dense=dense SCOPE=scope SVG2=svg2 --skip 1 --qkv layer2.safetensors -o report.html");
  command->add_option("clips", options->clips, "folders, the reference first; NAME=FOLDER gives one a name")
      ->required()
      ->expected(1, 16);
  command->add_option("-o,--output", options->output, "page to write, .html")->required();
  command->add_option("--title", options->title, "of the page")->capture_default_str();
  command
      ->add_option("--skip", options->skip, "frames at the start that do not count, such as one that was given to the model")
      ->check(whole(0, kMostFrames))
      ->capture_default_str();
  CLI::Option* qkv =
      command->add_option("--qkv", options->qkv, "q, k, v files to draw cluster maps of")->allow_extra_args(false);
  command->add_option("--head", options->head, "their head")
      ->check(whole(0, kMostSamples))
      ->needs(qkv)
      ->capture_default_str();
  command->add_option("--fps", options->fps, "frames per second when it plays")
      ->check(above(0.01, 120))
      ->capture_default_str();
  add_threads(*command, options->threads);
  command->callback([options] { run(*options); });
}

}  // namespace scope::cli
