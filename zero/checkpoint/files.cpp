#include "zero/checkpoint/files.h"

#include <ballast/error.h>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <functional>
#include <numeric>
#include <regex>
#include <set>
#include <string_view>

#include "kernels/runtime/system_resources.h"
#include "kernels/state_access.h"
#include "offload/checksum.h"
#include "offload/file.h"
#include "offload/run_directory.h"
#include "zero/checkpoint/json_value.h"
#include "zero/checkpoint/number_formats.h"

namespace ballast {
namespace {

using nlohmann::json;

constexpr std::uint64_t version = 1;
constexpr std::uint64_t most_ranks = 1 << 20;
constexpr std::uint64_t most_json_bytes = std::uint64_t{256} << 20;
constexpr std::string_view before_content = "{\"content\": ";
constexpr std::string_view before_seal = ", \"seal\": \"";
constexpr std::string_view after_seal = "\"}\n";
constexpr std::size_t seal_digits = 16;

[[noreturn]] void fail_changed(const std::filesystem::path& file) {
  fail(Code::bad_record, {.what = "a file of the checkpoint is not what was written", .where = file.string()});
}

// --- Files ---

std::uint64_t seal_of(std::string_view text) { return offload::checksum(std::as_bytes(std::span(text))); }

std::string text_of(std::uint64_t seal) { return fmt::format("{:016x}", seal); }

// None if there is no such file.
std::optional<std::string> read_file(const std::filesystem::path& path, std::uint64_t most) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file && (errno == ENOENT || errno == ENOTDIR)) return {};
  struct stat found {};
  if (!file || ::fstat(file.get(), &found) != 0) offload::fail_file("open", path, errno);
  if (static_cast<std::uint64_t>(found.st_size) > most) fail_changed(path);
  std::string text(static_cast<std::size_t>(found.st_size), '\0');
  std::size_t done = 0;
  while (done < text.size()) {
    const ssize_t count = ::pread(file.get(), text.data() + done, text.size() - done, static_cast<off_t>(done));
    if (count < 0 && errno != EINTR) offload::fail_file("read", path, errno, done);
    if (count == 0) fail_changed(path);
    if (count > 0) done += static_cast<std::size_t>(count);
  }
  return text;
}

std::string read_there(const std::filesystem::path& path, std::uint64_t most) {
  auto text = read_file(path, most);
  if (!text) offload::fail_file("open", path, ENOENT);
  return std::move(*text);
}

// --- JSON ---

std::uint64_t seal_in(const JsonValue& value) {
  const std::string digits = value.text();
  std::uint64_t number = 0;
  const auto failure = std::from_chars(digits.data(), digits.data() + digits.size(), number, 16).ec;
  value.require_kind(failure == std::errc{} && digits == text_of(number), "16 hexadecimal digits");
  return number;
}

std::string sealed(std::string_view content) {
  return fmt::format("{}{}{}{}{}", before_content, content, before_seal, text_of(seal_of(content)), after_seal);
}

std::string_view unsealed(std::string_view text, const std::filesystem::path& file) {
  const std::size_t around = before_content.size() + before_seal.size() + seal_digits + after_seal.size();
  if (text.size() < around) fail_changed(file);
  const std::string_view content = text.substr(before_content.size(), text.size() - around);
  if (text != sealed(content)) fail_changed(file);
  return content;
}

json parsed(const std::string& text, const std::filesystem::path& file) {
  try {
    return json::parse(unsealed(text, file));
  } catch (const json::exception& error) {
    fail_malformed(file, words_of(error));
  }
}

// --- What the files say ---

constexpr std::string_view roles[] = {"trained", "frozen",     "buffer",     "moment",
                                      "own",     "own tensor", "own number", "outer"};

const NumberFormat& torch_type(const JsonValue& name) {
  const std::string found = name.text();
  const auto* const known = std::ranges::find(number_formats, found, &NumberFormat::torch);
  name.require_kind(known != std::end(number_formats), "the name of a dtype of torch");
  return *known;
}

std::string rank_file(std::size_t rank, std::string_view kind) { return fmt::format("rank-{:05}.{}", rank, kind); }

SavedTensor tensor_of(const JsonValue& entry, std::uint64_t steps, std::uint64_t skipped) {
  const NumberFormat& type = torch_type(entry["dtype"]);
  SavedTensor tensor{.role = entry["role"].text(),
                     .dtype = std::string(type.torch),
                     .item_bytes = entry["item_bytes"].count(),
                     .shape = entry["shape"].shape()};
  tensor.steps = entry["steps"].count(tensor.role == "outer" ? steps + skipped : steps);
  entry["item_bytes"].require_kind(tensor.item_bytes == type.bytes, fmt::format("{}, for {}", type.bytes, type.torch));
  entry["role"].require_kind(std::ranges::count(roles, tensor.role) > 0,
                             fmt::format("one of {}", fmt::join(roles, ", ")));
  if (tensor.role != "trained") {
    for (const char* moment : {"momentum", "variance"})
      entry[moment].require_kind(!entry[moment].flag(), "false, for a tensor that is not trained");
    return tensor;
  }
  const std::string format = entry["format"].text();
  const auto* const known =
      std::ranges::find_if(all_state_formats, [&](StateFormat each) { return name(each) == format; });
  entry["format"].require_kind(known != std::end(all_state_formats), "the name of a state format");
  entry["dtype"].require_kind(type.ours && *type.ours != DType::u8, "float32, bfloat16 or float16");
  tensor.kind = {.parameter = *type.ours,
                 .format = *known,
                 .momentum = entry["momentum"].flag(),
                 .variance = entry["variance"].flag()};
  return tensor;
}

SavedPiece piece_of(const JsonValue& chunk, std::size_t rank, const SavedTensor& tensor, std::uint64_t data_bytes) {
  const std::vector<JsonValue> fields = chunk.elements(4);
  const Range range{fields[0].count(most_bytes), fields[1].count(data_bytes)};
  const offload::Chunk place{fields[2].count(most_bytes), tensor.chunk_bytes(range.count), seal_in(fields[3])};
  if (place.offset + place.bytes > data_bytes || place.offset % offload::chunk_alignment != 0)
    fields[2].refuse(fmt::format("a chunk of {} bytes in the {} bytes of this rank's data", place.bytes, data_bytes));
  const bool has_groups = tensor.kind && has_scales(*tensor.kind->format);
  if (has_groups && range.first % group_size != 0) fields[0].refuse(fmt::format("a multiple of {}", group_size));
  return {range, {rank, place}};
}

// A record of a run. It has no range: pieces are parts of it.
SavedPiece record_of(const JsonValue& record, std::size_t rank, std::uint64_t data_bytes) {
  const std::vector<JsonValue> fields = record.elements(10);
  const std::size_t payload = fields[6].count(data_bytes);
  const offload::KnownRecord known{.shape = {.run_id = seal_in(fields[2]),
                                             .rank = static_cast<std::uint32_t>(fields[3].count(UINT32_MAX)),
                                             .payload_bytes = payload,
                                             .first_bytes = fields[7].count(payload)},
                                   .name = {.tile = fields[4].count(), .generation = fields[5].count()},
                                   .seals = {seal_in(fields[8]), seal_in(fields[9])}};
  const offload::Chunk place{fields[0].count(most_bytes), offload::block_bytes + payload, 0};
  if (place.offset + place.bytes > data_bytes || place.offset % offload::block_bytes != 0)
    fields[0].refuse(fmt::format("a record of {} bytes in the {} bytes of this rank's data", place.bytes, data_bytes));
  return {{}, {rank, place, known}, 0, fields[1].count(data_bytes)};
}

json json_of_record(const SavedPiece& record) {
  const auto& [shape, name, seals] = *record.place.record;
  return {record.place.chunk.offset,
          record.record_elements,
          text_of(shape.run_id),
          shape.rank,
          name.tile,
          name.generation,
          shape.payload_bytes,
          shape.first_bytes,
          text_of(seals.first),
          text_of(seals.rest)};
}

SavedPiece piece_in_record(const JsonValue& piece, const std::vector<SavedPiece>& records, const SavedTensor& tensor) {
  const std::vector<JsonValue> fields = piece.elements(4);
  piece.require_kind(tensor.kind.has_value() && !records.empty(), "elements of a trained tensor in a record");
  SavedPiece found = records[fields[2].count(records.size() - 1)];
  const std::size_t elements = found.record_elements;
  found.in_record = fields[3].count(elements);
  found.range = {fields[0].count(most_bytes), fields[1].count(elements - found.in_record)};
  const bool fits = tensor.chunk_bytes(elements) <= found.place.record->shape.payload_bytes;
  fields[2].require_kind(fits, "a record with room for its elements");
  const std::size_t group = has_scales(*tensor.kind->format) ? group_size : 1;
  piece.require_kind(found.range.first % group == 0 && found.in_record % group == 0,
                     fmt::format("elements that begin at multiples of {}", group));
  return found;
}

void require_apart(std::vector<SavedPiece> pieces, const std::filesystem::path& file) {
  std::ranges::sort(pieces, {}, [](const SavedPiece& each) { return each.place.chunk.offset; });
  std::uint64_t end = 0;
  for (const SavedPiece& each : pieces) {
    const auto& [offset, bytes, seal] = each.place.chunk;
    if (offset < end) fail_malformed(file, fmt::format("two chunks overlap at byte {}", offset));
    end = offset + bytes;
  }
}

SavedExtra add_index(const std::filesystem::path& folder, std::size_t rank, const std::string& text, std::uint64_t seal,
                     SavedTensors& tensors) {
  const std::filesystem::path file = folder / rank_file(rank, "json");
  if (seal_of(text) != seal) fail_changed(file);
  const json content = parsed(text, file);
  const JsonValue index(content, file);
  const std::uint64_t data_bytes = index["data_bytes"].count(most_bytes);
  std::vector<SavedPiece> records, pieces;
  const auto add_pieces = [&](const char* key, const std::function<SavedPiece(const JsonValue&, SavedTensor&)>& read) {
    index[key].each_item([&](const std::string& name, const JsonValue& list) {
      const auto tensor = tensors.find(name);
      if (tensor == tensors.end())
        fail_malformed(file, fmt::format("it has {} of {}, which is no tensor of the checkpoint", key, name));
      for (const JsonValue& each : list.elements())
        tensor->second.pieces.push_back(read(each, tensor->second));
    });
  };
  add_pieces("chunks", [&](const JsonValue& chunk, const SavedTensor& tensor) {
    return pieces.emplace_back(piece_of(chunk, rank, tensor, data_bytes));
  });
  if (index.has("records")) {
    for (const JsonValue& record : index["records"].elements())
      records.push_back(record_of(record, rank, data_bytes));
    add_pieces("in_records", [&](const JsonValue& piece, const SavedTensor& tensor) {
      return piece_in_record(piece, records, tensor);
    });
    pieces.insert(pieces.end(), records.begin(), records.end());
  }
  require_apart(std::move(pieces), file);
  const JsonValue extra = index["extra"];
  return {.file = folder / rank_file(rank, "extra"),
          .bytes = extra["bytes"].count(most_bytes),
          .seal = seal_in(extra["seal"]),
          .is_raw = extra.has("raw") && extra["raw"].flag()};
}

void sort_pieces(const std::string& name, SavedTensor& tensor) {
  std::ranges::sort(tensor.pieces, {}, [](const SavedPiece& each) { return each.range.first; });
  std::size_t end = 0;
  for (const SavedPiece& each : tensor.pieces) {
    if (each.range.first != end) break;
    end += each.range.count;
  }
  const std::size_t held = std::transform_reduce(tensor.pieces.begin(), tensor.pieces.end(), std::size_t{0},
                                                 std::plus{}, [](const SavedPiece& each) { return each.range.count; });
  require(end == tensor.elements() && held == end, Code::bad_record, [&] {
    return Problem{.what = "the checkpoint does not hold each element once",
                   .where = fmt::format("{}, element {}", name, end),
                   .needed = fmt::format("{} elements", tensor.elements()),
                   .available = fmt::format("{} elements in {} pieces", held, tensor.pieces.size())};
  });
}

void require_known_format(const JsonValue& content, const std::filesystem::path& file) {
  const std::uint64_t found = content["format"].count();
  require(found <= version, Code::newer_format, [&] {
    const std::string writer = content.has("written_by") ? content["written_by"].text() : "a newer version";
    return Problem{.what = fmt::format("cannot read a checkpoint of format {}: Ballast {} wrote it", found, writer),
                   .where = file.string(),
                   .needed = fmt::format("format {}", version)};
  });
}

SavedOptimizer optimizer_of(const JsonValue& entry, const SavedTensors& tensors) {
  SavedOptimizer saved{.step = entry["step"].count(),
                       .skipped = entry["skipped"].count(),
                       .optimizer = entry["optimizer"].text(),
                       .own_step = entry["own_step"].flag(),
                       .outer_identity = entry["outer_identity"].text()};
  entry["moments"].each_item([&](const std::string& kind, const JsonValue& name) {
    entry["moments"].require_kind(kind == "momentum" || kind == "variance", "names of momentum and variance alone");
    saved.moments[kind] = name.text();
  });
  for (const JsonValue& group : entry["groups"].elements()) {
    saved.groups.push_back({.options = group["options"].text()});
    for (const JsonValue& name : group["parameters"].elements()) {
      name.require_kind(tensors.contains(name.text()), "the name of a tensor");
      saved.groups.back().parameters.push_back(name.text());
    }
  }
  static const std::regex identity("([0-9a-f]{16})?");
  const bool is_identity =
      saved.outer_identity.size() <= seal_digits && std::regex_match(saved.outer_identity, identity);
  entry["outer_identity"].require_kind(is_identity, "16 hexadecimal digits, or nothing");
  return saved;
}

void require_own_parameters(const std::vector<SavedOptimizer>& optimizers, const std::filesystem::path& file) {
  std::map<std::string, const SavedOptimizer*> owners;
  for (const SavedOptimizer& saved : optimizers) {
    for (const SavedGroup& group : saved.groups) {
      for (const std::string& name : group.parameters) {
        const SavedOptimizer* const owner = owners.emplace(name, &saved).first->second;
        if (owner != &saved) fail_malformed(file, fmt::format("{} is in the groups of two optimizers", name));
      }
    }
  }
}

json json_of(const SavedOptimizer& saved) {
  json groups = json::array();
  for (const SavedGroup& group : saved.groups)
    groups.push_back({{"parameters", group.parameters}, {"options", group.options}});
  return {{"step", saved.step},
          {"skipped", saved.skipped},
          {"optimizer", saved.optimizer},
          {"moments", saved.moments},
          {"groups", groups},
          {"own_step", saved.own_step},
          {"outer_identity", saved.outer_identity}};
}

json json_of(const SavedTensor& tensor) {
  return {{"role", tensor.role},
          {"dtype", tensor.dtype},
          {"item_bytes", tensor.item_bytes},
          {"shape", tensor.shape},
          {"format", tensor.kind ? json(ballast::name(*tensor.kind->format)) : json()},
          {"momentum", tensor.kind && tensor.kind->momentum},
          {"variance", tensor.kind && tensor.kind->variance},
          {"steps", tensor.steps}};
}

json json_of(const SavedLayout& layout) {
  const Placement& ranks = layout.placement;
  json units = json::array();
  for (const auto& [tensors, tile_elements] : layout.units)
    units.push_back({{"tensors", tensors}, {"tile_elements", tile_elements}});
  return {{"shards", ranks.shards},
          {"replicas", ranks.replicas},
          {"parameter_replicas", ranks.parameter_replicas},
          {"full_parameters", ranks.full_parameters},
          {"own_values", layout.own_values},
          {"units", units}};
}

SavedLayout layout_of(const JsonValue& content, const SavedTensors& tensors) {
  const auto ranks = [&](const char* key) {
    const std::size_t count = content[key].count(most_ranks);
    content[key].require_kind(count > 0, "at least 1");
    return count;
  };
  SavedLayout layout{.placement = {.shards = ranks("shards"),
                                   .replicas = ranks("replicas"),
                                   .full_parameters = content["full_parameters"].flag(),
                                   .parameter_replicas = ranks("parameter_replicas")},
                     .own_values = content["own_values"].count(max_own_values)};
  content["parameter_replicas"].require_kind(layout.placement.shards % layout.placement.parameter_replicas == 0,
                                             "a divisor of the shards");
  std::set<std::string> names;
  for (const JsonValue& unit : content["units"].elements()) {
    layout.units.push_back({.tile_elements = unit["tile_elements"].count(most_bytes)});
    for (const JsonValue& name : unit["tensors"].elements()) {
      layout.units.back().tensors.push_back(name.text());
      name.require_kind(tensors.contains(name.text()) && names.insert(name.text()).second, "a tensor of no other unit");
    }
  }
  content["units"].require_kind(names.size() == tensors.size(), "units with all tensors");
  return layout;
}

// What the manifests of checkpoints and of runs have in common.
json json_of(const SavedCheckpoint& saved) {
  json content = json_of(saved.optimizers.front());
  json others = json::array(), tensors = json::object();
  for (std::size_t other = 1; other < saved.optimizers.size(); ++other)
    others.push_back(json_of(saved.optimizers[other]));
  for (const auto& [name, tensor] : saved.tensors)
    tensors[name] = json_of(tensor);
  content.update({{"format", version}, {"others", others}, {"tensors", tensors}});
  return content;
}

SavedCheckpoint described_in(const JsonValue& content, const std::filesystem::path& file) {
  require_known_format(content, file);
  SavedCheckpoint saved;
  std::vector<JsonValue> optimizers{content};
  for (const JsonValue& other : content["others"].elements())
    optimizers.push_back(other);
  std::uint64_t steps = 0, skipped = 0;
  for (const JsonValue& each : optimizers) {
    steps = std::max<std::uint64_t>(steps, each["step"].count());
    skipped = std::max<std::uint64_t>(skipped, each["skipped"].count());
  }
  content["tensors"].each_item([&](const std::string& name, const JsonValue& entry) {
    saved.tensors.emplace(name, tensor_of(entry, steps, skipped));
  });
  for (const JsonValue& each : optimizers)
    saved.optimizers.push_back(optimizer_of(each, saved.tensors));
  require_own_parameters(saved.optimizers, file);
  return saved;
}

}  // namespace

std::string torch_name(DType dtype) {
  return std::string(std::ranges::find(number_formats, std::optional(dtype), &NumberFormat::ours)->torch);
}

std::size_t SavedTensor::elements() const {
  return std::accumulate(shape.begin(), shape.end(), std::size_t{1}, std::multiplies{});
}

DType SavedTensor::parameter_dtype(const std::string& name) const {
  const auto known = std::ranges::find(number_formats, dtype, &NumberFormat::torch)->ours;
  require(known.has_value(), Code::wrong_dtype, [&] {
    return Problem{.what = fmt::format("cannot load a parameter of {}", dtype),
                   .where = name,
                   .needed = "float32, bfloat16 or float16"};
  });
  return *known;
}

std::string SavedExtra::read() const {
  std::string content = read_there(file, bytes);
  if (content.size() != bytes || seal_of(content) != seal) fail_changed(file);
  return content;
}

std::map<std::string, std::string> moments_of(const optim::StateNames& names) {
  std::map<std::string, std::string> moments;
  if (!names.momentum.empty()) moments["momentum"] = names.momentum;
  if (!names.variance.empty()) moments["variance"] = names.variance;
  return moments;
}

std::uint64_t SavedCheckpoint::step() const { return std::ranges::max(optimizers, {}, &SavedOptimizer::step).step; }

std::optional<std::string> read_manifest(const std::filesystem::path& directory) {
  auto text = read_file(directory / manifest_name, most_json_bytes);
  if (text && text->empty()) fail_changed(directory / manifest_name);
  return text;
}

SavedCheckpoint parse_manifest(const std::string& manifest, const std::filesystem::path& file) {
  const json text = parsed(manifest, file);
  const JsonValue content(text, file);
  SavedCheckpoint checkpoint = described_in(content, file);
  checkpoint.folder = content["folder"].text();
  checkpoint.ranks = content["ranks"].count();
  checkpoint.converted_from = content["converted_from"].text();
  checkpoint.written_by = content["written_by"].text();
  content["folder"].require_kind(is_folder(checkpoint.folder),
                                 "the name of a folder next to the manifest, such as step-12-8c31f0a2");
  for (const JsonValue& index : content["indexes"].elements()) {
    const std::string expected = rank_file(checkpoint.seals.size(), "json");
    index["file"].require_kind(index["file"].text() == expected, expected);
    checkpoint.seals.push_back(seal_in(index["seal"]));
  }
  const std::size_t indexes = checkpoint.seals.size();
  content["ranks"].require_kind(checkpoint.ranks == indexes && indexes > 0,
                                fmt::format("{}, the number of indexes, and at least 1", indexes));
  return checkpoint;
}

std::string read_index(const std::filesystem::path& folder, std::size_t rank) {
  require(std::filesystem::is_directory(folder), Code::file_call, [&] {
    return Problem{
        .what = fmt::format("cannot read a checkpoint: the folder {}, which its {} names, is not there",
                            folder.filename().string(), manifest_name),
        .where = folder.parent_path().string(),
        .remedy = fmt::format("Copy or move a checkpoint with all its files: {} and that folder.", manifest_name)};
  });
  return read_there(folder / rank_file(rank, "json"), most_json_bytes);
}

SavedCheckpoint parse_checkpoint(const std::filesystem::path& directory, const std::string& manifest,
                                 const std::vector<std::string>& indexes) {
  SavedCheckpoint checkpoint = parse_manifest(manifest, directory / manifest_name);
  const std::filesystem::path folder = directory / checkpoint.folder;
  for (std::size_t rank = 0; rank < checkpoint.ranks; ++rank) {
    checkpoint.files.push_back(folder / rank_file(rank, "data"));
    const std::string text = indexes.empty() ? read_index(folder, rank) : indexes.at(rank);
    checkpoint.extras.push_back(add_index(folder, rank, text, checkpoint.seals[rank], checkpoint.tensors));
  }
  for (auto& [name, tensor] : checkpoint.tensors)
    sort_pieces(name, tensor);
  return checkpoint;
}

std::string manifest_of(const SavedCheckpoint& checkpoint, const std::filesystem::path& folder) {
  json content = json_of(checkpoint), indexes = json::array();
  while (indexes.size() < checkpoint.ranks) {
    const std::string file = rank_file(indexes.size(), "json");
    indexes.push_back({{"file", file}, {"seal", text_of(seal_of(read_there(folder / file, most_json_bytes)))}});
  }
  content.update({{"written_by", BALLAST_VERSION},
                  {"converted_from", checkpoint.converted_from},
                  {"folder", checkpoint.folder},
                  {"ranks", checkpoint.ranks},
                  {"indexes", indexes}});
  return sealed(json_text(content));
}

std::string run_manifest_of(const SavedCheckpoint& run) {
  json content = json_of(run);
  content["layout"] = json_of(*run.layout);
  return sealed(json_text(content));
}

std::string read_run_manifest(const std::filesystem::path& file) {
  try {
    std::string text = read_there(file, most_json_bytes);
    unsealed(text, file);
    return text;
  } catch (const Error&) {
    return {};
  }
}

SavedCheckpoint parse_run_manifest(const std::string& manifest, const std::filesystem::path& file) {
  const json text = parsed(manifest, file);
  const JsonValue content(text, file);
  SavedCheckpoint run = described_in(content, file);
  run.layout = layout_of(content["layout"], run.tensors);
  run.ranks = run.layout->placement.ranks();
  return run;
}

RankFiles::RankFiles(const std::filesystem::path& folder, std::size_t rank)
    : folder_(folder), rank_(rank), data_(folder / rank_file(rank, "data"), *queue_) {}

void RankFiles::append(const std::string& tensor, const Range& range, std::span<const std::byte> chunk) {
  chunks_[tensor].push_back({range, {rank_, data_.append(chunk)}});
}

void RankFiles::append(const std::string& tensor, const Range& range, const StatePart& part) {
  const ChunkKind kind = kind_of(part.memory, part.frozen);
  chunk_.assign(kind.bytes(part.memory.count), std::byte{0});
  kernels::copy_state(part.memory, kind.tile(chunk_.data(), part.memory.count));
  append(tensor, range, chunk_);
}

bool RankFiles::clone(const offload::OpenRecord& record) {
  auto place = data_.clone(record);
  if (!place) return false;
  place->file = rank_;
  records_.push_back({{}, *place, 0, record.elements});
  return true;
}

void RankFiles::append_cloned(const std::string& tensor, const Range& range, std::size_t in_record) {
  SavedPiece piece = records_.back();
  piece.range = range;
  piece.in_record = in_record;
  chunks_[tensor].push_back(piece);
}

std::uint64_t RankFiles::finish(std::span<const std::byte> extra, bool is_raw) {
  const std::uint64_t data_bytes = data_.finish();
  const std::string_view extra_text(reinterpret_cast<const char*>(extra.data()), extra.size());
  offload::write_text(folder_ / rank_file(rank_, "extra"), extra_text);
  const json described{{"bytes", extra.size()}, {"seal", text_of(seal_of(extra_text))}, {"raw", is_raw}};
  json index{{"chunks", json::object()}, {"data_bytes", data_bytes}, {"extra", described}};
  std::map<std::uint64_t, std::size_t> numbers;  // of the records, by their offset
  for (const SavedPiece& record : records_) {
    index["records"].push_back(json_of_record(record));
    numbers.emplace(record.place.chunk.offset, numbers.size());
  }
  if (!records_.empty()) index["in_records"] = json::object();
  for (const auto& [name, pieces] : chunks_) {
    for (const auto& [range, place, in_record, _] : pieces)
      place.record
          ? index["in_records"][name].push_back({range.first, range.count, numbers.at(place.chunk.offset), in_record})
          : index["chunks"][name].push_back({range.first, range.count, place.chunk.offset, text_of(place.chunk.seal)});
  }
  offload::write_text(folder_ / rank_file(rank_, "json"), sealed(json_text(index)));
  return data_bytes;
}

std::string current_folder(const std::filesystem::path& directory) {
  const auto manifest = read_manifest(directory);
  if (!manifest) return "";
  const std::filesystem::path file = directory / manifest_name;
  const json content = parsed(*manifest, file);
  return JsonValue(content, file)["folder"].text();
}

bool is_folder(std::string_view name) {
  static const std::regex folder("step-\\d+-[0-9a-f]{8}");
  constexpr std::size_t most =
      255;  // bytes: no file system has longer names, for which a regex takes much of the stack
  return name.size() <= most && std::regex_match(name.begin(), name.end(), folder);
}

}  // namespace ballast
