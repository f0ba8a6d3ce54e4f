// Tiles of bytes on one or several drives, never half new and never silently wrong: each tile has two places, a step writes
// the one it did not read, and a small commit makes the whole generation current.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "kernels/runtime/host_pages.h"
#include "offload/io_queue.h"
#include "offload/record_format.h"

namespace ballast::offload {

// A directory and the queue of the drive it lies on. The queue outlives the store.
struct Drive {
  std::filesystem::path directory;
  IoQueue* queue = nullptr;
};

struct StoreOptions {
  std::string name = "state";  // of the files: NAME.records in each directory
  FileOptions file{};
  Log* log = nullptr;  // outlives the store

  std::filesystem::path path_in(const std::filesystem::path& directory) const {
    return directory / (name + ".records");
  }
};

// What the first file and its commit slots say, before anything of it is trusted.
struct FoundRecords {
  RecordShape shape{};
  struct Found {
    CommitPoint point{};
    std::uint64_t step = 0;
  };
  std::vector<Found> commits{};  // whose seal is right: two at most, the newest first
};

// A record on its way into memory.
class PendingRead {
 public:
  const Completion& completion() const { return completion_; }

  // Waits, and checks what came while it is still in the caches. B3202 names file, tile and damage.
  void check() const;
  std::span<std::byte> payload() const;  // checked

 private:
  friend class RecordStore;

  Completion completion_;
  RecordShape shape_;
  RecordName name_;
  Seals expected_;
  std::span<std::byte> record_;
  const File* file_ = nullptr;
  Log* log_ = nullptr;
};

// One thread writes and commits; any may read meanwhile. Memory of records begins at a multiple of block_bytes.
class RecordStore {
 public:
  // Makes the files with every payload zero, as generation 1 of step 0. Existing files are not touched; if it fails,
  // it leaves none. The drives' space is asked for before anything is written (B2202).
  static RecordStore create(const RecordShape& shape, std::span<const Drive> drives, const StoreOptions& options = {});

  // The same in files without names, which are gone with the process.
  static RecordStore scratch(const RecordShape& shape, std::span<const Drive> drives, const StoreOptions& options = {});

  // Reads what open() would find, and changes nothing. None where there is no file. Throws as read_identity() and
  // check_name() do.
  static std::optional<FoundRecords> look(std::span<const Drive> drives, const StoreOptions& options = {});

  // Opens the newest generation of which everything is there. One that is passed over is overwritten by the next commit.
  static RecordStore open(const RecordShape& shape, std::span<const Drive> drives, const StoreOptions& options = {});

  RecordStore(RecordStore&&) noexcept;
  RecordStore& operator=(RecordStore&&) = delete;
  ~RecordStore();  // waits for what is in flight

  std::size_t record_bytes() const { return places_.record_bytes(); }  // memory that a record needs
  std::size_t first_record_bytes() const { return places_.first_record_bytes(); }
  const RecordShape& shape() const { return shape_; }

  std::uint64_t generation() const { return generation_; }
  std::uint64_t step() const { return step_; }
  CommitPoint point() const { return point_; }
  std::span<const std::byte> user() const { return user_; }  // as the commit was given them

  // What was last written, which may not be committed yet: who reads a tile has waited for its write. The first region alone
  // needs only first_record_bytes().
  PendingRead read(std::size_t tile, std::span<std::byte> record) const;
  PendingRead read_first(std::size_t tile, std::span<std::byte> record) const;

  // Where a tile's owner puts it before write().
  std::span<std::byte> payload(std::span<std::byte> record) const { return payload_of(shape_, record); }

  // For the next generation; the seal is made here, by the calling thread. One that failed may be written again.
  Completion write(std::size_t tile, std::span<std::byte> record);

  // Once every tile is written: the next generation becomes the current one. `user` comes back from user().
  void commit(std::uint64_t step, std::span<const std::byte> user = {});

  // What was written for the next generation counts as never written.
  void abandon();

  // Makes the generation of this commit the current one, before anything is written. False where it is not there with all
  // its records: then the current one stays.
  bool go_to(CommitPoint point);

  // The next commit is number + 1 of this incarnation.
  void count_from(CommitPoint point) { point_ = point; }

 private:
  RecordStore(const RecordShape& shape, std::span<const Drive> drives, const StoreOptions& options);

  struct Stripe {
    File file;
    IoQueue* queue;
  };

  void add(File file, IoQueue& queue);
  void fill_with_zeros();
  void find_generation();
  bool make_current(const Commit& commit);
  bool load(const Commit& commit);
  void say_unusable(const Commit& commit, std::string_view reason) const;
  PendingRead start_read(std::size_t tile, std::span<std::byte> record, std::size_t bytes) const;
  void write_commit_record(const Commit& commit);
  void flush();
  void check(std::size_t tile, std::span<std::byte> record, std::size_t bytes) const;
  void require_known_state() const;
  void wait(const Completion& completion, std::string_view what) const;
  std::span<std::byte> control() const { return {control_.get(), commit_bytes}; }

  RecordShape shape_;
  RecordPlaces places_;
  Log* log_;
  HostPages control_;                             // for identities and commit records
  std::vector<std::unique_ptr<Stripe>> stripes_;  // the kernel and the queues know files by their address
  std::uint64_t generation_ = 0;
  std::uint64_t step_ = 0;
  CommitPoint point_{};
  std::vector<std::byte> user_;
  // Guards what tells a tile's newest record: generation_ and all below.
  std::unique_ptr<std::mutex> newest_ = std::make_unique<std::mutex>();
  std::vector<Seals> current_;  // of each tile
  std::vector<Seals> next_;
  struct Written {
    bool started = false;
    Completion completion{};
  };
  std::vector<Written> written_;
  bool commit_failed_ = false;
};

}  // namespace ballast::offload
