#include "zero/safetensors_writer.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <regex>

#include "kernels/runtime/sizes.h"
#include "offload/file.h"
#include "zero/checkpoint/directory.h"
#include "zero/checkpoint/json_value.h"

namespace ballast {
namespace {

using nlohmann::json;

constexpr mode_t readable_by_all = 0666;  // as far as the process lets it be
using Part = std::vector<SafetensorsItem>;

std::vector<Part> parts_of(const std::vector<SafetensorsItem>& items, std::size_t part_bytes) {
  std::vector<Part> parts(1);
  std::size_t bytes = 0;  // in the last part
  for (const SafetensorsItem& item : items) {
    if (bytes > 0 && bytes + item.bytes > part_bytes) {
      parts.emplace_back();
      bytes = 0;
    }
    bytes += item.bytes;
    parts.back().push_back(item);
  }
  return parts;
}

void split_longest(std::vector<Part>& parts) {
  const auto longest = std::ranges::max_element(parts, {}, &Part::size);
  const auto middle = longest->begin() + std::ssize(*longest) / 2;
  const Part rest(middle, longest->end());
  longest->erase(middle, longest->end());
  parts.insert(longest + 1, rest);
}

}  // namespace

std::string SafetensorsWriter::part_name(std::size_t number, std::size_t parts) const {
  return parts == 1 ? stem_ + ".safetensors" : fmt::format("{}-{:05}-of-{:05}.safetensors", stem_, number + 1, parts);
}

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& directory, std::string stem,
                                     const std::vector<SafetensorsItem>& items, std::size_t part_bytes)
    : directory_(directory), stem_(std::move(stem)) {
  make_directories(directory_);
  std::vector<Part> parts = parts_of(items, part_bytes);
  // One part more gives all parts other names than those of the export that is there, which stays until the end.
  std::error_code unreadable;
  while (parts.size() > 1 && std::filesystem::exists(directory_ / part_name(0, parts.size()), unreadable))
    split_longest(parts);
  json index;
  std::uint64_t total = 0;
  for (const Part& part : parts) {
    json header{{"__metadata__", {{"format", "pt"}}}};
    const std::string name = part_name(files_.size(), parts.size());
    offload::NewFile& file = files_.emplace_back(directory_ / name, readable_by_all);
    std::uint64_t end = 0;
    for (const SafetensorsItem& item : part) {
      places_[item.name] = {&file, end};
      header[item.name] = {{"dtype", item.format}, {"shape", item.shape}, {"data_offsets", {end, end + item.bytes}}};
      index["weight_map"][item.name] = name;
      end += item.bytes;
    }
    total += end;
    std::string text = json_text(header);
    text.resize(round_up(text.size(), sizeof(std::uint64_t)), ' ');
    const std::uint64_t bytes = text.size();
    file.write(0, {reinterpret_cast<const char*>(&bytes), sizeof bytes});
    file.write(sizeof bytes, text);
    for (const SafetensorsItem& item : part)
      places_.at(item.name).begin += sizeof bytes + bytes;
  }
  if (parts.size() == 1) return;
  index["metadata"]["total_size"] = total;
  files_.emplace_back(directory_ / index_name(), readable_by_all).write(0, json_text(index, 2) + "\n");
}

void SafetensorsWriter::write(const std::string& name, std::uint64_t begin, std::string_view bytes) {
  const Place& place = places_.at(name);
  place.file->write(place.begin + begin, bytes);
}

void SafetensorsWriter::finish() {
  for (offload::NewFile& file : files_)
    file.flush();
  for (offload::NewFile& file : files_) {
    if (&file == &files_.back()) offload::flush_directory(directory_);  // the index comes last
    file.keep();
  }
  offload::flush_directory(directory_);
  remove_others();
}

// Readers take the single file where there is one, so that goes first.
void SafetensorsWriter::remove_others() const {
  static const std::regex end(R"((-\d{5,}-of-\d{5,})?\.safetensors(\.index\.json)?(\.unfinished)?)");
  std::vector<std::string> others{part_name(0, 1), index_name()};
  for (const auto& each : std::filesystem::directory_iterator(directory_)) {
    const std::string name = each.path().filename().string();
    if (name.starts_with(stem_) && std::regex_match(name.substr(stem_.size()), end)) others.push_back(name);
  }
  for (const std::string& each : others) {
    const bool stays = std::ranges::count(names(), each) > 0;
    const std::filesystem::path file = directory_ / each;
    if (!stays && ::unlink(file.c_str()) != 0 && errno != ENOENT) offload::fail_file("unlink", file, errno);
  }
}

std::vector<std::string> SafetensorsWriter::names() const {
  std::vector<std::string> names;
  for (const offload::NewFile& file : files_)
    names.push_back(file.name().filename().string());
  return names;
}

}  // namespace ballast
