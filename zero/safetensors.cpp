#include <ballast/safetensors.h>
#include <ballast/training_state.h>

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "kernels/backend.h"
#include "kernels/runtime/host_pages.h"
#include "kernels/runtime/sizes.h"
#include "kernels/runtime/system_resources.h"
#include "offload/file.h"
#include "zero/checkpoint/json_value.h"
#include "zero/checkpoint/number_formats.h"
#include "zero/comm/on_all_ranks.h"
#include "zero/plan/names_in_files.h"
#include "zero/safetensors_writer.h"

namespace ballast::safetensors {
namespace {

using nlohmann::json;
using std::filesystem::path;

constexpr const char* suffix = ".safetensors";
constexpr const char* single_name = "model.safetensors";
constexpr const char* index_name = "model.safetensors.index.json";
constexpr std::size_t moved_at_once = std::size_t{1} << 18;  // elements
constexpr std::size_t most_header_bytes = 100'000'000;       // the limit of the safetensors package

const NumberFormat* find_format(std::string_view name) {
  return std::ranges::find(number_formats, std::optional(name), &NumberFormat::safetensors);
}

bool converts(const NumberFormat& from, DType to) {
  if (to == DType::u8) return from.bytes == 1;
  return from.safetensors == "F64" || (from.ours && from.ours != DType::u8);
}

// The names of all tensors in files, by unit.
std::vector<std::vector<std::string>> names_in_files(const Model& model) {
  std::vector<std::vector<std::string>> names = names_of_whole_units(model);
  std::set<std::string> all;
  for (const std::vector<std::string>& of_unit : names) {
    for (const std::string& name : of_unit) {
      require(all.insert(name).second, Code::bad_argument, [&] {
        return Problem{.what = "cannot use safetensors files: two tensors of the model have the same name in them",
                       .where = name,
                       .needed = "names of units and tensors that differ when they are joined with a dot"};
      });
    }
  }
  return names;
}

// --- Reading ---

HostPages map_file(const path& file) {
  const Descriptor descriptor(::open(file.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat found {};
  if (!descriptor || ::fstat(descriptor.get(), &found) != 0) offload::fail_file("open", file, errno);
  const auto bytes = static_cast<std::size_t>(found.st_size);
  if (bytes == 0) fail_malformed(file, "it is empty");
  void* const memory = ::mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, descriptor.get(), 0);
  if (memory == MAP_FAILED) offload::fail_file("mmap", file, errno);
  return HostPages(static_cast<std::byte*>(memory), Unmap{bytes});
}

std::span<const std::byte> bytes_of(const HostPages& file) { return {file.get(), file.get_deleter().bytes}; }

[[noreturn]] void fail_foreign(const path& file, const std::string& why) {
  fail(Code::bad_argument, {.what = "cannot read weights: it is no safetensors file, nor an index of some: " + why,
                            .where = file.string(),
                            .needed = "a header in JSON after 8 bytes with its length"});
}

json parse(std::span<const std::byte> bytes, const path& file) {
  if (bytes.size() > most_header_bytes)
    fail_malformed(file, fmt::format("it has a header of {}", human_bytes(bytes.size())), "at most 100 MB");
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  std::vector<std::set<std::string>> names;  // those in each object that is open
  const auto require_new = [&](int, json::parse_event_t event, const json& value) {
    if (event == json::parse_event_t::object_start) names.emplace_back();
    if (event == json::parse_event_t::object_end) names.pop_back();
    if (event == json::parse_event_t::key && !names.back().insert(value.get<std::string>()).second)
      fail_foreign(file, fmt::format("it names {} twice", value.dump()));
    return true;
  };
  try {
    return json::parse(text, require_new);
  } catch (const json::exception& error) {
    fail_foreign(file, words_of(error));
  }
}

// The tensors of a file. Each byte after the header belongs to one of them, as the format demands.
std::map<std::string, StoredTensor> tensors_in(std::span<const std::byte> bytes, const path& file) {
  std::uint64_t header = 0;
  if (bytes.size() >= sizeof header) std::memcpy(&header, bytes.data(), sizeof header);
  if (bytes.size() < sizeof header || header > bytes.size() - sizeof header)
    fail_foreign(file, "it ends before its header does");
  const json content = parse(bytes.subspan(sizeof header, header), file);
  if (!content.is_object()) fail_foreign(file, "its header is no JSON object");
  const std::span<const std::byte> data = bytes.subspan(sizeof header + header);
  std::map<std::string, StoredTensor> tensors;
  std::vector<std::tuple<std::size_t, std::size_t, std::string>> places;  // begin and end in the data, and name
  JsonValue(content, file).each_item([&](const std::string& name, const JsonValue& entry) {
    if (name == "__metadata__") return;
    const std::string dtype = entry["dtype"].text();
    const NumberFormat* const format = find_format(dtype);
    require(format != std::end(number_formats), Code::bad_argument, [&] {
      return Problem{.what = fmt::format("cannot read a tensor that holds {}", dtype),
                     .where = fmt::format("{} in {}", name, file.string()),
                     .needed = "a format whose elements are whole bytes"};
    });
    const StoredTensor& tensor =
        tensors[name] = {.format = *format->safetensors, .shape = entry["shape"].shape(), .file = file};
    const std::size_t needed =
        std::accumulate(tensor.shape.begin(), tensor.shape.end(), format->bytes, std::multiplies());
    const std::vector<JsonValue> offsets = entry["data_offsets"].elements(2);
    const std::size_t begin = offsets[0].count(most_bytes), end = offsets[1].count(most_bytes);
    if (end != begin + needed) {
      fail_malformed(file, fmt::format("{} has {} bytes", name, static_cast<std::int64_t>(end - begin)),
                     fmt::format("{}, for its shape and format", needed));
    }
    places.emplace_back(begin, end, name);
  });
  std::ranges::sort(places);
  std::size_t end = 0;
  std::string last = "the header";
  for (const auto& [begin, next, name] : places) {
    if (begin < end) fail_malformed(file, fmt::format("{} overlaps with {}", name, last));
    if (begin > end) fail_malformed(file, fmt::format("{} does not begin where {} ends", name, last));
    tensors[name].begin = bytes.size() - data.size() + begin;
    if (next > data.size()) {
      fail(Code::bad_record, {.what = fmt::format("cannot use a file: it is cut off inside of {}", name),
                              .where = file.string(),
                              .needed = fmt::format("{} bytes", bytes.size() - data.size() + next),
                              .available = fmt::format("{} bytes", bytes.size())});
    }
    tensors[name].bytes = data.subspan(begin, next - begin);
    end = next;
    last = name;
  }
  if (end < data.size())
    fail_malformed(file, fmt::format("no tensor has the {} bytes at the end of it", data.size() - end));
  return tensors;
}

path file_of(const path& given) {
  std::error_code failed;
  std::vector<path> found;
  if (!std::filesystem::is_directory(given, failed)) {
    if (std::filesystem::is_regular_file(given, failed)) return given;
  } else {
    for (const char* const name : {single_name, index_name}) {
      if (std::filesystem::exists(given / name, failed)) return given / name;
    }
    for (std::filesystem::directory_iterator each(given, failed), end; !failed && each != end; each.increment(failed)) {
      if (each->path().extension() == suffix) found.push_back(each->path());
    }
    if (found.size() == 1) return found.front();
  }
  fail(Code::bad_argument,
       {.what = found.empty() ? "cannot read weights: there are none"
                              : "cannot read weights: there are several files, and no index of them",
        .where = given.string(),
        .needed = fmt::format("a file, or a folder with {}, with {}, or with one *{}", single_name, index_name, suffix),
        .available = failed ? failed.message() : fmt::format("{} files *{}", found.size(), suffix)});
}

void read(const StoredTensor& from, const Range& range, const View& to, kernels::Backend& backend) {
  const NumberFormat& format = *find_format(from.format);
  const auto bytes = from.bytes.subspan(range.first * format.bytes, range.count * format.bytes);
  if (bytes.empty()) return;
  if (to.dtype() == DType::u8 || format.ours == to.dtype()) {
    std::memcpy(to.data(), bytes.data(), bytes.size());
    return;
  }
  std::vector<double> aligned(moved_at_once);
  for (std::size_t first = 0; first < range.count; first += moved_at_once) {
    const std::size_t count = std::min(moved_at_once, range.count - first);
    std::memcpy(aligned.data(), bytes.data() + first * format.bytes, count * format.bytes);
    if (format.ours) {
      backend.cast({reinterpret_cast<const std::byte*>(aligned.data()), count, *format.ours}, to.part(first, count));
    } else {
      std::vector<float> rounded(count);
      std::ranges::transform(std::span(aligned).first(count), rounded.begin(),
                             [](double each) { return static_cast<float>(each); });
      backend.cast(std::span<const float>(rounded), to.part(first, count));
    }
  }
}

}  // namespace

struct Source::Contents {
  path source{};
  std::vector<HostPages> files{};
  std::map<std::string, StoredTensor> tensors{};

  void add_file(const path& file) {
    const std::span<const std::byte> bytes = bytes_of(files.emplace_back(map_file(file)));
    std::map<std::string, StoredTensor> found = tensors_in(bytes, file);
    tensors.merge(found);
    if (!found.empty()) fail_malformed(file, fmt::format("another file has {} too", found.begin()->first));
  }

  void add_indexed(const path& index) {
    const HostPages text = map_file(index);
    const json content = parse(bytes_of(text), index);
    std::map<std::string, std::vector<std::string>> listed;  // the names in each file
    JsonValue(content, index)["weight_map"].each_item([&](const std::string& name, const JsonValue& where) {
      const std::string file = where.text();
      std::error_code failed;
      const bool is_there = std::filesystem::is_regular_file(index.parent_path() / file, failed);
      where.require_kind(is_there && path(file).filename() == file, "the name of a file that is next to the index");
      listed[file].push_back(name);
    });
    for (const auto& [file, names] : listed) {
      add_file(index.parent_path() / file);
      for (const std::string& name : names) {
        if (!tensors.contains(name)) fail_malformed(index, fmt::format("{} is not in {}", name, file));
      }
    }
  }
};

Source::Source(const path& given) {
  auto contents = std::make_shared<Contents>();
  contents->source = file_of(given);
  contents->source.extension() == ".json" ? contents->add_indexed(contents->source)
                                          : contents->add_file(contents->source);
  contents_ = std::move(contents);
}

std::vector<std::string> Source::names() const {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : contents_->tensors)
    names.push_back(name);
  return names;
}

const StoredTensor* Source::find(const std::string& name) const {
  const auto found = contents_->tensors.find(name);
  return found == contents_->tensors.end() ? nullptr : &found->second;
}

ParameterSource Source::parameters(const Model& model) const {
  std::vector<std::vector<const StoredTensor*>> stored;
  std::vector<std::string> unfit;
  for (const std::vector<std::string>& names : names_in_files(model)) {
    const Unit& unit = model.units[stored.size()];
    std::vector<const StoredTensor*>& of_unit = stored.emplace_back();
    for (const std::string& name : names) {
      const Tensor& tensor = unit.tensors[of_unit.size()];
      const StoredTensor* const found = of_unit.emplace_back(find(name));
      if (found == nullptr) {
        unfit.push_back(name + " is missing");
      } else if (found->shape != tensor.shape) {
        unfit.push_back(fmt::format("{} has the shape [{}], and [{}] in the model", name, fmt::join(found->shape, ", "),
                                    fmt::join(tensor.shape, ", ")));
      } else if (!converts(*find_format(found->format), unit.dtype)) {
        unfit.push_back(
            fmt::format("{} has the format {}, and {} in the model", name, found->format, ballast::name(unit.dtype)));
      }
    }
  }
  require(unfit.empty(), Code::bad_argument, [&] {
    const std::span<const std::string> first = std::span(unfit).first(std::min<std::size_t>(unfit.size(), 4));
    const std::size_t more = unfit.size() - first.size();
    std::vector<std::string> names = this->names();
    const std::size_t others = names.size() - std::min<std::size_t>(names.size(), 4);
    names.resize(names.size() - others);
    return Problem{
        .what = fmt::format("cannot read the weights of a model: {} of its tensors are missing or do not fit",
                            unfit.size()),
        .where = contents_->source.string(),
        .needed = "the tensors of the model, under their names in it",
        .available = fmt::format("{}{}", fmt::join(first, "; "), more > 0 ? fmt::format("; and {} more", more) : ""),
        .remedy =
            fmt::format("The files have {}{}. Add a tensor that shares the values of another one by Model::tied().",
                        fmt::join(names, ", "), others > 0 ? fmt::format(" and {} more", others) : "")};
  });
  const std::shared_ptr<kernels::Backend> backend = kernels::cpu_backend({.threads = 1});
  return [files = contents_, stored, backend](std::size_t unit, std::size_t tensor, Range range, const View& to) {
    read(*stored[unit][tensor], range, to, *backend);
  };
}

// --- Writing ---

namespace {

std::vector<SafetensorsItem> items_of(const Model& model, const std::vector<std::vector<std::string>>& names) {
  std::vector<SafetensorsItem> items;
  for (std::size_t unit = 0; unit < names.size(); ++unit) {
    const NumberFormat& format = *std::ranges::find(number_formats, model.units[unit].dtype, &NumberFormat::ours);
    for (std::size_t tensor = 0; tensor < names[unit].size(); ++tensor) {
      const Tensor& described = model.units[unit].tensors[tensor];
      items.push_back({names[unit][tensor], *format.safetensors, described.shape, described.elements() * format.bytes});
    }
  }
  return items;
}

void write(const std::string& name, const ConstView& values, const TrainingState& state, SafetensorsWriter& files) {
  std::string buffer;
  for (std::size_t first = 0; first < values.count(); first += moved_at_once) {
    const ConstView part = values.part(first, std::min(moved_at_once, values.count() - first));
    buffer.resize(part.bytes());
    state.read_memory(part, reinterpret_cast<std::byte*>(buffer.data()));
    files.write(name, first * byte_size(values.dtype()), buffer);
  }
}

}  // namespace

void write(const path& directory, Training& training, const WriteOptions& options) {
  Communicator& world = training.world();
  TrainingState state(training);
  state.require_between_steps("write the parameters");
  const std::vector<std::vector<std::string>> names = names_in_files(training.model());
  std::optional<SafetensorsWriter> files;  // of rank 0
  on_all_ranks(world, [&] {
    if (world.rank() == 0) files.emplace(directory, "model", items_of(training.model(), names), options.file_bytes);
  });
  for (std::size_t unit = 0; unit < names.size(); ++unit) {
    const Lease lease = state.exact_parameters(unit);
    on_all_ranks(world, [&] {
      for (std::size_t tensor = 0; files && tensor < names[unit].size(); ++tensor)
        write(names[unit][tensor], lease[tensor], state, *files);
    });
  }
  on_all_ranks(world, [&] {
    if (files) files->finish();
  });
}

}  // namespace ballast::safetensors
