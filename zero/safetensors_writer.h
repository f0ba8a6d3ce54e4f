// The safetensors files of one model while they are written, as transformers reads them: one file, or several and their index.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "offload/run_directory.h"

namespace ballast {

struct SafetensorsItem {
  std::string name{};
  std::string_view format{};  // as files name it, such as "BF16"
  std::vector<std::size_t> shape{};
  std::size_t bytes = 0;
};

// Used by one thread. Its end before finish() removes the files.
class SafetensorsWriter {
 public:
  // Creates the directory and the files, under temporary names. A part has at most so many bytes of tensors, unless one has more.
  SafetensorsWriter(const std::filesystem::path& directory, std::string stem, const std::vector<SafetensorsItem>& items,
                    std::size_t part_bytes);
  SafetensorsWriter(SafetensorsWriter&&) = delete;

  // Writes bytes of a tensor, which begin at this one.
  void write(const std::string& name, std::uint64_t begin, std::string_view bytes);

  // Gives the files their names, once all are on the drive, and removes those of an earlier export. No file replaces one that an
  // index names: a process that is killed leaves the earlier export or this one.
  void finish();

  std::vector<std::string> names() const;      // of the files
  void discard() noexcept { files_.clear(); }  // no call may follow

 private:
  struct Place {
    offload::NewFile* file = nullptr;
    std::uint64_t begin = 0;
  };

  std::string part_name(std::size_t number, std::size_t parts) const;
  std::string index_name() const { return stem_ + ".safetensors.index.json"; }
  void remove_others() const;

  std::filesystem::path directory_;
  std::string stem_;
  std::deque<offload::NewFile> files_{};
  std::map<std::string, Place> places_{};
};

}  // namespace ballast
