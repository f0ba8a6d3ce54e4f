#include <ballast/memory.h>

#include <algorithm>

namespace ballast {
namespace {

constexpr std::array kinds{MemoryKind::device, MemoryKind::pinned, MemoryKind::pageable};

// The peak is updated only at a release or a query. So a reservation that is cancelled after a failed allocation leaves
// no trace.
MemoryAccounts::Usage up_to_date(const MemoryAccounts::Usage& usage) {
  return {usage.now, std::max(usage.peak, usage.now)};
}

void give_back(MemoryAccounts::Usage& usage, std::size_t bytes) {
  usage = up_to_date(usage);
  usage.now -= bytes;
}

}  // namespace

std::string_view name(MemoryKind kind) {
  constexpr std::array<std::string_view, 3> names{"device", "pinned", "pageable"};
  return names[static_cast<std::size_t>(kind)];
}

Reservation::~Reservation() {
  if (accounts_ != nullptr) {
    accounts_->release(*this);
  }
}

void Reservation::cancel() noexcept { std::exchange(accounts_, nullptr)->cancel(*this); }

void Reservation::swap(Reservation& other) noexcept {
  std::swap(accounts_, other.accounts_);
  std::swap(owner_, other.owner_);
  std::swap(bytes_, other.bytes_);
  std::swap(kind_, other.kind_);
}

Reservation MemoryAccounts::reserve(MemoryKind kind, std::size_t bytes, std::string owner) {
  const std::lock_guard lock(mutex_);
  Book& booked = book(kind);
  booked.owners[owner].now += bytes;
  booked.total.now += bytes;
  Reservation reservation;
  reservation.accounts_ = this;
  reservation.owner_ = std::move(owner);
  reservation.bytes_ = bytes;
  reservation.kind_ = kind;
  return reservation;
}

void MemoryAccounts::release(const Reservation& reservation) noexcept {
  const std::lock_guard lock(mutex_);
  Book& booked = book(reservation.kind());
  give_back(booked.owners.find(reservation.owner())->second, reservation.bytes());
  give_back(booked.total, reservation.bytes());
}

void MemoryAccounts::cancel(const Reservation& reservation) noexcept {
  const std::lock_guard lock(mutex_);
  Book& booked = book(reservation.kind());
  booked.owners.find(reservation.owner())->second.now -= reservation.bytes();
  booked.total.now -= reservation.bytes();
}

MemoryAccounts::Usage MemoryAccounts::total(MemoryKind kind) const {
  const std::lock_guard lock(mutex_);
  return up_to_date(book(kind).total);
}

MemoryAccounts::Usage MemoryAccounts::usage(MemoryKind kind, const std::string& owner) const {
  const std::lock_guard lock(mutex_);
  const auto found = book(kind).owners.find(owner);
  return found == book(kind).owners.end() ? Usage{} : up_to_date(found->second);
}

std::vector<MemoryAccounts::Entry> MemoryAccounts::entries() const {
  const std::lock_guard lock(mutex_);
  std::vector<Entry> all;
  for (const MemoryKind kind : kinds) {
    for (const auto& [owner, usage] : book(kind).owners) {
      all.push_back({kind, owner, up_to_date(usage)});
    }
  }
  std::ranges::stable_sort(all, [](const Entry& a, const Entry& b) {
    return a.kind != b.kind ? a.kind < b.kind : a.usage.peak > b.usage.peak;
  });
  return all;
}

}  // namespace ballast
