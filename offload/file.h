// An open file on a drive, and what its file system asks of those who read and write it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>

namespace ballast::offload {

inline constexpr std::size_t block_bytes = 4096;  // direct I/O in units of this works on every drive we know of

struct FileOptions {
  bool create = false;         // a new file, readable by its user only; an existing one is an error
  bool direct = true;          // past the page cache, where the file system can
  bool allow_network = false;  // NFS and its kind: slow, and a lost server stops the process
  bool writable = true;
};

// Closed by its owner's end. Moves nothing by itself: an IoQueue does.
class File {
 public:
  explicit File(const std::filesystem::path& path, const FileOptions& options = {});

  // Without a name, in a directory: gone with the last process that has it open, however that one ends.
  static File nameless(const std::filesystem::path& directory, const FileOptions& options = {});

  File(File&& other) noexcept;
  File& operator=(File&&) = delete;
  ~File();

  const std::filesystem::path& path() const { return path_; }
  int descriptor() const { return descriptor_; }
  std::uint64_t bytes() const;  // now
  void rename(const std::filesystem::path& to);

  // Direct I/O moves whole blocks of block_bytes, to and from memory that begins at a multiple of it.
  bool direct() const { return buffered_because_.empty(); }
  const std::string& buffered_because() const { return buffered_because_; }

 private:
  File(std::filesystem::path path, int descriptor) : path_(std::move(path)), descriptor_(descriptor) {}

  std::filesystem::path path_;
  int descriptor_ = -1;
  std::string buffered_because_ = "it is requested";
};

// A new or removed name is on the drive when this returns.
void flush_directory(const std::filesystem::path& directory);

// Throws B3201, or B2202 where the drive is full; `error` is an errno.
[[noreturn]] void fail_file(std::string_view operation, const std::filesystem::path& path, std::uint64_t offset,
                            int error);

}  // namespace ballast::offload
