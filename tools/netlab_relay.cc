// Carries packets between the hosts of tools/netlab: each arrives late by the same time, and some
// are lost. For kernels without netem; tools/netlab_links.py compiles and starts it.
//
//   netlab_relay RATE LATENCY LOSS SEED DEVICE ADDRESS NAMESPACE [DEVICE ADDRESS NAMESPACE ...]
//
// RATE is in bits per second, or 0, LATENCY in nanoseconds, LOSS a probability. Each triple is a
// port: a TUN device that is made in the network namespace of that file ("" for our own), and the
// IPv4 address of its host. "ready" on stdout says that they exist. Lines of stdin unplug a port
// and plug it in again, by its number: "down 1", "up 1". At the end of stdin, the counts are
// printed as JSON.
//
// `tc` limits what leaves a host to the rate, but lets bursts through; here the bytes of a burst
// follow each other at the rate, as on a cable.
//
// The kernel hands over TCP segments in a row as one super-packet of up to 64 KB, which makes the
// relay cheap. Losses are nevertheless of single segments: what is left of a super-packet is one
// for each run of segments in a row. Packets of a port keep their order.

#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <netinet/ip.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <random>
#include <sstream>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

constexpr int64_t kSecond = 1'000'000'000, kNever = INT64_MAX;
// Bytes on their way at which further packets are dropped: 0.2 s at 10 Gbit/s.
constexpr size_t kMostOnTheWay = 256 << 20;
// Packets of a port that are taken before others have their turn.
constexpr int kInTurn = 16;

// What precedes each packet: the virtio_net_hdr of <linux/virtio_net.h>, which is no C++.
struct Prefix {
  // Whether the checksum is still to be computed, and the kind of super-packet: 0 if it is none.
  uint8_t flags, kind;
  uint16_t headers, segment, checksum_start, checksum_offset;
};
constexpr size_t kPrefix = sizeof(Prefix);
static_assert(kPrefix == 10);

// A packet on its way, behind its prefix.
struct Packet {
  int64_t due;
  size_t to;
  std::vector<char> bytes;
};

// A host's end of its link.
struct Port {
  int file;
  std::mt19937_64 random;
  bool plugged_in = true;
  // When the last byte has left the host.
  int64_t free_at = 0;
  // What the host has sent, in the order of the times: all take the same.
  std::deque<Packet> on_the_way = {};
};

struct Counts {
  int64_t bytes = 0, lost = 0, unplugged = 0, overflow = 0;
};

[[noreturn]] void Fail(const std::string& action) {
  fprintf(stderr, "netlab_relay: %s: %s\n", action.c_str(), strerror(errno));
  exit(1);
}

int64_t Now() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * kSecond + now.tv_nsec;
}

// Returns the file of a new TUN device in a network namespace, which this thread enters.
int MakeDevice(const std::string& name, const std::string& network_namespace) {
  if (!network_namespace.empty()) {
    const int entered = open(network_namespace.c_str(), O_RDONLY | O_CLOEXEC);
    if (entered < 0 || setns(entered, CLONE_NEWNET)) Fail("cannot enter " + network_namespace);
    close(entered);
  }
  const int file = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  if (file < 0) Fail("cannot open /dev/net/tun");
  ifreq request = {};
  request.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR;
  strncpy(request.ifr_name, name.c_str(), IFNAMSIZ - 1);
  if (ioctl(file, TUNSETIFF, &request)) Fail("cannot make a TUN device");
  if (ioctl(file, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)) Fail("cannot take super-packets");
  return file;
}

// Returns the checksum of an IP header whose own checksum is 0.
uint16_t Checksum(const char* header, size_t size) {
  uint32_t sum = 0;
  for (size_t i = 0; i < size; i += 2) {
    uint16_t two;
    memcpy(&two, header + i, 2);
    sum += two;
  }
  while (sum >> 16) sum = (sum & 0xFFFF) + (sum >> 16);
  return ~sum;
}

// A packet as it was read; its headers are valid if `IsIPv4`.
class Read {
 public:
  Read(const char* bytes, size_t size) : bytes_(bytes), size_(size) {
    memcpy(&prefix_, bytes, kPrefix);
    if (IsIPv4()) memcpy(&ip_, bytes + kPrefix, sizeof ip_);
  }

  bool IsIPv4() const { return size_ >= kPrefix + sizeof(iphdr) && bytes_[kPrefix] >> 4 == 4; }

  in_addr_t Destination() const { return ip_.daddr; }

  // Returns the number of packets that a cable would carry.
  size_t Segments() const {
    if (prefix_.kind == 0) return 1;
    return (size_ - Headers() + prefix_.segment - 1) / prefix_.segment;
  }

  // Returns the number of bytes that a cable would carry.
  size_t Bytes() const {
    if (prefix_.kind == 0) return size_ - kPrefix;
    return size_ - kPrefix + (Segments() - 1) * (Headers() - kPrefix);
  }

  // Returns the packet with only the segments from `begin` to before `end`.
  std::vector<char> Part(size_t begin, size_t end) const {
    if (begin == 0 && end == Segments()) return {bytes_, bytes_ + size_};
    const size_t headers = Headers(), skipped = begin * prefix_.segment;
    const size_t last = std::min(size_, headers + end * prefix_.segment);
    std::vector<char> part(bytes_, bytes_ + headers);
    part.insert(part.end(), bytes_ + headers + skipped, bytes_ + last);

    Prefix prefix = prefix_;
    if (end - begin == 1) prefix.kind = 0, prefix.segment = 0;
    memcpy(part.data(), &prefix, kPrefix);

    iphdr ip = ip_;
    ip.tot_len = htons(part.size() - kPrefix);
    ip.id = htons(ntohs(ip.id) + begin);
    ip.check = 0;
    char* ip_at = part.data() + kPrefix;
    memcpy(ip_at, &ip, sizeof ip);
    ip.check = Checksum(ip_at, IpHeader());
    memcpy(ip_at, &ip, sizeof ip);

    tcphdr tcp;
    memcpy(&tcp, ip_at + IpHeader(), sizeof tcp);
    tcp.seq = htonl(ntohl(tcp.seq) + skipped);
    if (last < size_) tcp.fin = tcp.psh = 0;
    // The checksum stays: it has not been computed (see Prefix::flags), and the receiver knows.
    memcpy(ip_at + IpHeader(), &tcp, sizeof tcp);
    return part;
  }

 private:
  size_t IpHeader() const { return 4 * ip_.ihl; }

  // Returns the length of all headers of a packet with TCP segments.
  size_t Headers() const {
    tcphdr tcp;
    memcpy(&tcp, bytes_ + kPrefix + IpHeader(), sizeof tcp);
    return kPrefix + IpHeader() + 4 * tcp.doff;
  }

  const char* bytes_;
  size_t size_;
  Prefix prefix_;
  iphdr ip_;
};

class Relay {
 public:
  Relay(double rate, int64_t latency, double loss)
      : per_byte_(rate > 0 ? 8 * kSecond / rate : 0), latency_(latency), loss_(loss) {}

  void AddPort(int file, in_addr_t address, uint64_t seed) {
    port_of_[address] = ports_.size();
    ports_.push_back({file, std::mt19937_64(seed)});
  }

  // Carries packets until the end of stdin.
  void Run() {
    std::vector<pollfd> files = {{STDIN_FILENO, POLLIN, 0}};
    for (const Port& port : ports_) files.push_back({port.file, POLLIN, 0});
    while (true) {
      const int64_t next = Deliver();
      const int64_t left = std::max<int64_t>(0, next - Now());
      const timespec wait = {left / kSecond, left % kSecond};
      const int ready = ppoll(files.data(), files.size(), next == kNever ? nullptr : &wait, nullptr);
      if (ready < 0 && errno != EINTR) Fail("cannot wait for packets");
      if (ready <= 0) continue;
      if (files[0].revents && !Obey()) return;
      for (size_t i = 0; i < ports_.size(); ++i) {
        if (files[i + 1].revents) Take(ports_[i]);
      }
    }
  }

  void PrintCounts() const {
    rusage used;
    getrusage(RUSAGE_SELF, &used);
    const double seconds = used.ru_utime.tv_sec + used.ru_stime.tv_sec +
                           1e-6 * (used.ru_utime.tv_usec + used.ru_stime.tv_usec);
    printf("{\"cpu\": %.3f, \"bytes\": %ld, \"lost\": %ld, \"unplugged\": %ld, \"full\": %ld}\n",
           seconds, counts_.bytes, counts_.lost, counts_.unplugged, counts_.overflow);
  }

 private:
  // Obeys the lines of stdin; returns false at its end.
  bool Obey() {
    char text[4096];
    const ssize_t size = read(STDIN_FILENO, text, sizeof text);
    if (size <= 0) return false;
    std::istringstream lines(std::string(text, size));
    std::string command;
    size_t port;
    while (lines >> command >> port) ports_.at(port).plugged_in = command == "up";
    return true;
  }

  // Takes what a host has sent.
  void Take(Port& from) {
    for (int i = 0; i < kInTurn; ++i) {
      const ssize_t size = read(from.file, buffer_.data(), buffer_.size());
      if (size <= static_cast<ssize_t>(kPrefix)) return;
      const Read packet(buffer_.data(), size);
      if (!packet.IsIPv4()) continue;
      const auto to = port_of_.find(packet.Destination());
      if (to == port_of_.end()) continue;
      const size_t segments = packet.Segments();
      if (!from.plugged_in) {
        counts_.unplugged += segments;
        continue;
      }
      from.free_at = std::max(from.free_at, Now()) + std::llround(packet.Bytes() * per_byte_);
      for (size_t begin = 0; begin < segments;) {
        size_t end = begin;
        while (end < segments && !IsLost(from)) ++end;
        if (end < segments) ++counts_.lost;
        if (end > begin) Send(packet, begin, end, from, to->second);
        begin = end + 1;
      }
    }
  }

  bool IsLost(Port& from) { return loss_ > 0 && from.random() * 0x1p-64 < loss_; }

  void Send(const Read& packet, size_t begin, size_t end, Port& from, size_t to) {
    if (bytes_on_the_way_ > kMostOnTheWay) {
      counts_.overflow += end - begin;
      return;
    }
    from.on_the_way.push_back({from.free_at + latency_, to, packet.Part(begin, end)});
    bytes_on_the_way_ += from.on_the_way.back().bytes.size();
  }

  // Delivers the packets whose time has come; returns when the next one's comes.
  int64_t Deliver() {
    int64_t next = kNever;
    for (Port& from : ports_) {
      std::deque<Packet>& packets = from.on_the_way;
      for (; !packets.empty() && packets.front().due <= Now(); packets.pop_front()) {
        Arrive(packets.front());
      }
      if (!packets.empty()) next = std::min(next, packets.front().due);
    }
    return next;
  }

  void Arrive(const Packet& packet) {
    const Port& to = ports_[packet.to];
    const std::vector<char>& bytes = packet.bytes;
    bytes_on_the_way_ -= bytes.size();
    if (!to.plugged_in) {
      counts_.unplugged += Read(bytes.data(), bytes.size()).Segments();
    } else if (write(to.file, bytes.data(), bytes.size()) > 0) {
      counts_.bytes += bytes.size() - kPrefix;
    }
  }

  // Nanoseconds that a byte takes to leave a host.
  const double per_byte_;
  const int64_t latency_;
  const double loss_;
  std::vector<Port> ports_;
  std::unordered_map<in_addr_t, size_t> port_of_;
  size_t bytes_on_the_way_ = 0;
  Counts counts_;
  std::vector<char> buffer_ = std::vector<char>(kPrefix + 65536);
};

}  // namespace

int main(int count, char** arguments) {
  if (count < 8 || (count - 5) % 3) {
    fprintf(stderr, "netlab_relay: started by tools/netlab\n");
    return 2;
  }
  Relay relay(atof(arguments[1]), atoll(arguments[2]), atof(arguments[3]));
  const uint64_t seed = atoll(arguments[4]);
  // Ports of our own namespace must come first: one that has been entered is not left.
  for (int i = 5; i < count; i += 3) {
    // Each port has its own losses, whatever the others send.
    relay.AddPort(MakeDevice(arguments[i], arguments[i + 2]), inet_addr(arguments[i + 1]),
                  seed * 1000 + i);
  }
  // Packets are in time although the job uses all cores; without the right to it they may be late.
  const sched_param priority = {1};
  if (sched_setscheduler(0, SCHED_RR, &priority)) perror("netlab_relay: no priority");
  prctl(PR_SET_TIMERSLACK, 1);
  puts("ready");
  fflush(stdout);
  relay.Run();
  relay.PrintCounts();
}
