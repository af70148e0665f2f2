// scope evaluate: PSNR and SSIM of one clip against another.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <memory>
#include <string>

#include "bounds.h"
#include "clip.h"
#include "commands.h"
#include "json.h"
#include "outputs.h"
#include "plot.h"
#include "terminal.h"

namespace scope::cli {

namespace {

struct EvaluateOptions {
  std::string a, b, json, csv, plot;
  int64_t skip = 0;
  int threads = 0;
};

void run(const EvaluateOptions& options) {
  const Clip a = open_clip(options.a), b = open_clip(options.b);
  Outputs outputs;
  a.declare(outputs);
  b.declare(outputs);
  outputs.writes("--json", options.json);
  outputs.writes("--csv", options.csv);
  outputs.writes("--plot", options.plot);
  ThreadPool pool(options.threads);
  auto progress = std::make_unique<Progress>("evaluate", std::ssize(a.frames));
  const VideoQuality quality = compare_clips(pool, a, b, options.skip, [&] { progress->step("frames"); });
  progress.reset();
  const io::Image first = io::read_png(a.frames[0]);
  nlohmann::ordered_json json{{"reference", options.a}, {"clip", options.b}, {"size", {first.width, first.height}}};
  json.update(quality_json(quality));
  if (!options.json.empty()) write_json(outputs.open(options.json), json);
  if (!options.csv.empty()) {
    std::string csv = "frame,mse,psnr,ssim\n";
    for (size_t i = 0; i < quality.frames.size(); ++i) {
      const FrameQuality& frame = quality.frames[i];
      csv += fmt::format("{},{:.10g},{:.6f},{:.8f}\n", i, frame.mse, frame.psnr, frame.ssim);
    }
    write_text(outputs.open(options.csv), csv);
  }
  if (!options.plot.empty()) {
    Series series{b.name, {}};
    for (size_t i = 0; i < quality.frames.size(); ++i) {
      if (!std::isinf(quality.frames[i].psnr)) series.points.emplace_back(i, quality.frames[i].psnr);
    }
    write_text(outputs.open(options.plot),
               svg(Chart{.title = fmt::format("PSNR against {}, frame by frame", a.name),
                         .x_label = "frame",
                         .y_label = "dB",
                         .note = fmt::format("{} frames of {} x {}", a.frames.size(), first.width, first.height),
                         .series = {series}}));
  }
  outputs.place();

  fmt::print("{}\n", bold(fmt::format("{} against {}: {} frames of {} x {}", options.b, options.a, a.frames.size(),
                                      first.width, first.height)));
  fmt::print("  PSNR   {}, mean of the frames'; {} of the pooled error\n", decibel(quality.mean_psnr),
             decibel(quality.pooled_psnr));
  fmt::print("  SSIM   {:.5f}, mean of the frames'\n", quality.ssim);
  fmt::print("  worst  frame {}: {}, SSIM {:.5f}\n", quality.worst, decibel(quality.frames[quality.worst].psnr),
             quality.frames[quality.worst].ssim);
  if (quality.skip > 0) fmt::print("  the first {} frames do not count\n", quality.skip);
  if (quality.equal_frames > 0) fmt::print("  {} frames are equal, with an infinite PSNR\n", quality.equal_frames);
  fmt::print(
      "RGB in [0, 1], PSNR 10 log10(1 / MSE); SSIM by an 11 x 11 Gaussian window of sigma 1.5 on R, G and B, windows inside "
      "the\n"
      "frame only.\n");
}

}  // namespace

void add_evaluate(CLI::App& app) {
  auto options = std::make_shared<EvaluateOptions>();
  CLI::App* command = app.add_subcommand(
      "evaluate",
      "Measure how far a clip is from another of the same frames, such as a sparse run from the dense "
      "one of the same seed.\n"
      "A clip is a folder of PNG frames; those of one name are compared. PSNR is averaged both ways: over "
      "the frames' PSNR,\n"
      "and as the PSNR of the mean error, which one bad frame governs.\n\n"
      "  scope evaluate dense scope --json quality.json --csv frames.csv --plot psnr.svg");
  command->add_option("reference", options->a, "folder of the clip to compare with")->required();
  command->add_option("clip", options->b, "folder of the clip to judge")->required();
  command
      ->add_option("--skip", options->skip, "frames at the start that do not count, such as one that was given to the model")
      ->check(whole(0, kMostFrames))
      ->capture_default_str();
  command->add_option("--json", options->json, "write all numbers as JSON; an infinite PSNR is null");
  command->add_option("--csv", options->csv, "write frame,mse,psnr,ssim");
  command->add_option("--plot", options->plot, "write PSNR by frame as SVG");
  add_threads(*command, options->threads);
  command->callback([options] { run(*options); });
}

}  // namespace scope::cli
