// Finds the generation from which a store resumes.
#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>

#include "offload/record_store.h"

namespace ballast::offload {
namespace {

// Reads the first block into the beginning of `control`.
std::span<std::byte> first_block(const File& file, IoQueue& queue, std::span<std::byte> control) {
  require(file.bytes() >= block_bytes, Code::bad_record, [&] {
    return Problem{.what = "cannot open the file: it is not a record file of Ballast", .where = file.path().string()};
  });
  const std::span<std::byte> block = control.first(block_bytes);
  queue.submit({IoKind::read, &file, 0, block}).wait();
  return block;
}

struct SealedCommit {
  Commit commit{};                // refers to the note below
  std::vector<std::byte> note{};  // a vector keeps its address when it is moved
};

// Returns the newest first.
std::vector<SealedCommit> sealed_commits(const RecordShape& shape, const File& file, IoQueue& queue,
                                         std::span<std::byte> control) {
  std::vector<SealedCommit> sealed;
  for (const std::uint64_t slot : {0u, 1u}) {
    queue.submit({IoKind::read, &file, RecordPlaces::commit_offset(slot), control}).wait();
    const auto found = read_commit(shape, control);
    if (!found.has_value() || found->generation == 0) continue;
    SealedCommit& added = sealed.emplace_back(SealedCommit{*found, {found->note.begin(), found->note.end()}});
    added.commit.note = added.note;
  }
  std::ranges::sort(sealed, std::ranges::greater{}, [](const SealedCommit& each) { return each.commit.generation; });
  return sealed;
}

}  // namespace

RecordStore RecordStore::open(const RecordShape& shape, std::span<const Drive> drives, const StoreOptions& options) {
  RecordStore store(shape, drives, options);
  for (std::size_t i = 0; i < drives.size(); ++i) {
    store.add(File(options.path_in(drives[i].directory), options.file), *drives[i].queue);
    const Stripe& stripe = *store.stripes_[i];
    check_identity(shape, {i, drives.size()}, first_block(stripe.file, *stripe.queue, store.control()),
                   stripe.file.path());
    require(stripe.file.bytes() >= store.places_.file_bytes(i), Code::bad_record, [&] {
      return Problem{.what = "the file is cut off",
                     .where = stripe.file.path().string(),
                     .needed = fmt::format("{} bytes", store.places_.file_bytes(i)),
                     .available = fmt::format("{} bytes", stripe.file.bytes())};
    });
  }
  store.find_generation();
  return store;
}

std::optional<FoundRecords> RecordStore::look(std::span<const Drive> drives, const StoreOptions& options) {
  const std::filesystem::path path = options.path_in(drives.front().directory);
  if (!std::filesystem::exists(path)) return {};
  FileOptions unchanged = options.file;
  unchanged.writable = false;
  const File file(path, unchanged);
  const HostPages memory = map_host_pages(commit_bytes, "control blocks of record files");
  const std::span<std::byte> control{memory.get(), commit_bytes};
  IoQueue& queue = *drives.front().queue;
  const Identity identity = read_identity(first_block(file, queue, control), path);
  check_name(identity, {0, drives.size()}, path);
  FoundRecords found{.shape = identity.shape};
  const bool has_commits =
      file.bytes() >= RecordPlaces::commit_offset(1) + commit_bytes;  // else open() reports that the file is cut off
  if (!has_commits) return found;
  for (const auto& [commit, note] : sealed_commits(found.shape, file, queue, control)) {
    found.commits.push_back({commit.point, commit.step, commit.label});
  }
  return found;
}

void RecordStore::find_generation() {
  const Stripe& first = *stripes_.front();
  const auto sealed = sealed_commits(shape_, first.file, *first.queue, control());
  if (std::ranges::any_of(sealed, [&](const SealedCommit& each) { return make_current(each.commit); })) return;
  fail(Code::bad_record, {.what = sealed.empty() ? "cannot open the record file: it holds no committed generation"
                                                 : "cannot open the record file: no generation has all its records",
                          .where = first.file.path().string()});
}

bool RecordStore::go_to(CommitPoint point) {
  if (point_ == point) return true;
  const Stripe& first = *stripes_.front();
  return std::ranges::any_of(
      sealed_commits(shape_, first.file, *first.queue, control()),
      [&](const SealedCommit& each) { return each.commit.point == point && make_current(each.commit); });
}

bool RecordStore::make_current(const Commit& commit) {
  if (!load(commit)) return false;
  const std::lock_guard lock(*newest_);
  generation_ = commit.generation;
  step_ = commit.step;
  point_ = counted_from_ = commit.point;
  note_.assign(commit.note.begin(), commit.note.end());
  label_ = commit.label;
  current_.swap(next_);
  return true;
}

// Reads the head of every record, and keeps their seals in `next_`. Returns false if they differ from the committed
// ones.
bool RecordStore::load(const Commit& commit) {
  constexpr std::size_t at_once = commit_bytes / block_bytes;
  const auto head = [&](std::size_t i) { return control().subspan(i * block_bytes, block_bytes); };
  for (std::size_t begin = 0; begin < shape_.tiles; begin += at_once) {
    const std::size_t count = std::min(at_once, shape_.tiles - begin);
    InFlight reads;
    for (std::size_t i = 0; i < count; ++i) {
      const Stripe& stripe = *stripes_[places_.file_of(begin + i)];
      reads.add(
          stripe.queue->submit({IoKind::read, &stripe.file, places_.offset_of(begin + i, commit.generation), head(i)}));
    }
    reads.wait();
    for (std::size_t i = 0; i < count; ++i) {
      const HeadCheck found = check_head(shape_, {begin + i, commit.generation}, head(i));
      if (!found.problem.empty()) {
        log_unusable(commit, fmt::format("tile {}: {}", begin + i, found.problem));
        return false;
      }
      next_[begin + i] = found.seals;
    }
  }
  if (hash_of(next_) == commit.seals_hash) return true;
  log_unusable(commit, "its records are intact, but not all of them belong to the commit");
  return false;
}

void RecordStore::log_unusable(const Commit& commit, std::string_view reason) const {
  if (log_ == nullptr) return;
  log_->warning(fmt::format("{}: generation {} (step {}) cannot be used: {}", stripes_.front()->file.path().string(),
                            commit.generation, commit.step, reason));
}

}  // namespace ballast::offload
