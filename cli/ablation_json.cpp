// The JSON of scope ablate: what it writes, and reads again to go on from.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "ablation.h"
#include "io/file.h"
#include "json.h"
#include "machine.h"
#include "statistics.h"
#include "video/fields.h"

namespace scope::cli::ablation {

namespace {

constexpr int64_t kMostResult = int64_t{64} << 20;  // bytes of a result to go on from

nlohmann::ordered_json seconds_columns(const std::vector<Result>& results) {
  return {{"total", each(results, &Result::total)},
          {"dense_calls", each(results, &Result::dense_calls)},
          {"sparse_attention", each(results, &Result::attend)},
          {"selection", each(results, &Result::selection)},
          {"rest", each(results, &Result::rest)}};
}

nlohmann::ordered_json threshold_json(const Threshold& by) {
  return {{"control", by.control}, {"value", by.value}, {"density", by.density}, {"below", by.below},
          {"above", by.above},     {"runs", by.runs},   {"alpha", by.alpha}};
}

// What `row_json` wrote, so that a run goes on with the same threshold.
Threshold read_threshold(const nlohmann::json& from) {
  return {from.at("control"), from.at("value"), from.at("density"), from.at("below"),
          from.at("above"),   from.at("runs"),  from.at("alpha")};
}

nlohmann::ordered_json row_json(const Findings& found, const Row& row) {
  nlohmann::ordered_json out{{"variant", row.variant},
                             {found.point_name(), row.point},
                             {"control", row.control},
                             {"settings", settings_json(row.settings)},
                             {"psnr", each(row.results, &Result::psnr)},
                             {"pooled_psnr", each(row.results, &Result::pooled_psnr)},
                             {"ssim", each(row.results, &Result::ssim)},
                             {"worst_psnr", each(row.results, &Result::worst_psnr)},
                             {"density", each(row.results, &Result::density)},
                             {"calls", {{"dense", row.results[0].dense_count}, {"sparse", row.results[0].sparse_count}}},
                             {"seconds", seconds_columns(row.results)},
                             {"same_calls_dense_seconds", each(row.results, &Result::same_calls_dense)},
                             {"notes", row.notes}};
  if (row.threshold) out["threshold"] = threshold_json(*row.threshold);
  return out;
}

nlohmann::ordered_json table_json(const Findings& found, const Table& table) {
  nlohmann::ordered_json out{{"title", table.title}, {"lines", nlohmann::ordered_json::array()}};
  for (const double point : found.points(table)) {
    const Row* first = nullptr;
    for (const Row* row : found.table_rows(table, point)) {
      if (first == nullptr) first = row;
      const Paired pair = paired(*row, *first);
      const auto psnr = each(row->results, &Result::psnr);
      out["lines"].push_back({{"variant", row->variant},
                              {found.point_name(), row->point},
                              {"density", mean(each(row->results, &Result::density))},
                              {"psnr", mean(psnr)},
                              {"psnr_deviation", deviation(psnr)},
                              {"psnr_least", *std::min_element(psnr.begin(), psnr.end())},
                              {"pooled_psnr", mean(each(row->results, &Result::pooled_psnr))},
                              {"ssim", mean(each(row->results, &Result::ssim))},
                              {"against", first->variant},
                              {"paired_difference", pair.difference},
                              {"paired_deviation", pair.deviation},
                              {"wins", pair.wins},
                              {"call_speedup", call_speedup(*row)},
                              {"run_speedup", run_speedup(*row)}});
    }
  }
  return out;
}

// The columns of `row_json`, beside the dense videos; where there are none yet, the columns of these.
std::vector<Result> read_results(const std::string& path, const nlohmann::json& row, int64_t seeds,
                                 const std::vector<Result>& dense) {
  std::vector<Result> out(static_cast<size_t>(seeds));
  const auto fill = [&](const nlohmann::json& columns, const char* name, double Result::*value) {
    const auto& column = columns.at(name);
    require(column.is_array() && std::ssize(column) == seeds, Status::format, "{}: {} has not {} values", path, name, seeds);
    for (size_t i = 0; i < out.size(); ++i) out[i].*value = column[i].is_null() ? INFINITY : column[i].get<double>();
  };
  const auto& seconds = row.at("seconds");
  fill(seconds, "total", &Result::total);
  fill(seconds, "dense_calls", &Result::dense_calls);
  fill(seconds, "sparse_attention", &Result::attend);
  fill(seconds, "selection", &Result::selection);
  fill(seconds, "rest", &Result::rest);
  for (Result& result : out) {
    result.dense_count = row.at("calls").at("dense");
    result.sparse_count = row.at("calls").value("sparse", int64_t{0});
  }
  if (dense.empty()) return out;
  fill(row, "psnr", &Result::psnr);
  fill(row, "pooled_psnr", &Result::pooled_psnr);
  fill(row, "ssim", &Result::ssim);
  fill(row, "worst_psnr", &Result::worst_psnr);
  fill(row, "density", &Result::density);
  fill(row, "same_calls_dense_seconds", &Result::same_calls_dense);
  for (size_t i = 0; i < out.size(); ++i) out[i].dense_total = dense[i].total;
  return out;
}

void take_row(const Findings& found, const std::string& path, Row& row, const nlohmann::json& all, int64_t seeds) {
  const auto same = [&](const nlohmann::json& each) {
    return each.at("variant") == row.variant && each.at("control") == row.control &&
           (std::isnan(row.point) ? each.at(found.point_name()).is_null() : each.at(found.point_name()) == row.point);
  };
  const auto saved = std::find_if(all.begin(), all.end(), same);
  if (saved == all.end()) {
    row.left_out =
        std::any_of(found.skipped.begin(), found.skipped.end(), [&](const auto& each) { return each.first == row.variant; });
    require(row.left_out, Status::invalid_argument, "--resume: {} has no {} at {}", path, row.variant, row.point);
    return;
  }
  if (found.match == Match::run && !row.control && !std::isnan(row.point)) {
    row.threshold = read_threshold(saved->at("threshold"));
    row.settings = row.threshold->apply(row.settings);
  }
  require(saved->at("settings") == nlohmann::json(settings_json(row.settings)), Status::invalid_argument,
          "--resume: {} has {} at {} with other settings", path, row.variant, row.point);
  row.results = read_results(path, *saved, seeds, found.dense);
  row.notes = saved->at("notes");
  for (const std::string& note : row.notes) {
    require(note.starts_with(row.variant + ": "), Status::format, "{}: a note of {} is about another variant: {}", path,
            row.variant, note);
  }
}

}  // namespace

nlohmann::ordered_json to_json(const Findings& found, const nlohmann::ordered_json& about, const Context& context) {
  nlohmann::ordered_json out = about;
  out.update({{"finished", found.finished()},
              {"seeds", found.dense.size()},
              {"machine", machine_json(context)},
              {"dense", {{"calls", {{"dense", found.dense[0].dense_count}}}, {"seconds", seconds_columns(found.dense)}}},
              {"rows", nlohmann::ordered_json::array()},
              {"tables", nlohmann::ordered_json::array()},
              {"skipped", nlohmann::ordered_json::array()}});
  for (const Row& row : found.rows) out["rows"].push_back(row_json(found, row));
  for (const Table& table : found.tables) out["tables"].push_back(table_json(found, table));
  for (const auto& [variant, why] : found.skipped) out["skipped"].push_back({{"variant", variant}, {"why", why}});
  return out;
}

void take_seeds(Findings& found, const std::string& path, const nlohmann::ordered_json& about, const Context& context) {
  const auto bytes = io::read_file(path, kMostResult);
  const auto saved = video::parse_json({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  try {
    const nlohmann::json mine = about, machine = machine_json(context);
    for (const auto& [name, value] : mine.items()) {
      require(saved.at(name) == value, Status::invalid_argument, "--resume: {} has {} {}, and this run {}", path, name,
              video::shown(saved.at(name)), video::shown(value));
    }
    for (const char* name : {"gpu", "instruction_set"}) {
      const std::string theirs = saved.at("machine").value(name, ""), own = machine.value(name, "");
      require(theirs == own, Status::invalid_argument, "--resume: {} was made with {} \"{}\", and this run has \"{}\"", path,
              name, theirs, own);
    }
    const auto seeds = saved.at("seeds").get<int64_t>();
    require(seeds >= 1 && seeds <= found.seeds, Status::invalid_argument,
            "--resume: {} has {} seeds, expected at most those of --seeds, {}", path, seeds, found.seeds);
    found.dense = read_results(path, saved.at("dense"), seeds, {});
    for (const auto& each : saved.at("skipped")) found.skipped.emplace_back(each.at("variant"), each.at("why"));
    for (Row& row : found.rows) take_row(found, path, row, saved.at("rows"), seeds);
    std::erase_if(found.rows, [](const Row& row) { return row.left_out; });
  } catch (const nlohmann::json::exception& error) {
    fail(Status::format, "{}: this is no result of scope ablate: {}", path, error.what());
  }
}

}  // namespace scope::cli::ablation
