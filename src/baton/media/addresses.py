"""Which addresses are public: an explicit list of those that are not. Pure.

`ipaddress.is_global` depends on the version of Python and lets through deprecated IPv6 forms that a router or gateway
may still deliver to an IPv4 address. So an address must pass both.
"""

import ipaddress

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# Services of clouds that hand out credentials to whoever can connect. Allowed only where they are named one by one.
METADATA: tuple[Address, ...] = tuple(
    ipaddress.ip_address(address)
    for address in (
        "169.254.169.254",  # AWS, Azure, Google, OpenStack and others
        "169.254.170.2",  # AWS ECS: credentials of a task
        "169.254.170.23",  # AWS EKS: credentials of a pod
        "169.254.169.253",  # AWS: DNS
        "169.254.0.23",  # Tencent
        "168.63.129.16",  # Azure: the agent of a virtual machine; a public address
        "100.100.100.200",  # Alibaba
        "192.0.0.192",  # Oracle
        "fd00:ec2::254",  # AWS over IPv6
        "fd00:ec2::23",  # AWS EKS over IPv6
        "fd20:ce::254",  # Google over IPv6
    )
)

_DENIED_IPV4 = tuple(
    ipaddress.IPv4Network(network)
    for network in (
        "0.0.0.0/8",  # this network
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # carrier-grade NAT
        "127.0.0.0/8",  # loopback
        "168.63.129.16/32",  # Azure
        "169.254.0.0/16",  # link-local
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # protocol assignments
        "192.0.2.0/24",  # documentation
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",  # private
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, broadcast
    )
)

# Every other IPv6 address is local, deprecated or reserved: fc00::/7, fe80::/10, fec0::/10, ff00::/8, ::a.b.c.d,
# ::ffff:0:a.b.c.d, 64:ff9b:1::/48, 100::/64, 5f00::/16 and so on.
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
_DENIED_IPV6 = tuple(
    ipaddress.IPv6Network(network)
    for network in (
        "2001::/23",  # protocol assignments: Teredo, ORCHID, benchmarks
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4
        "3fff::/20",  # documentation
    )
)
# A gateway delivers these to the IPv4 address in their last four bytes.
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
# Interface identifiers of ISATAP, in front of an IPv4 address.
_ISATAP = (0x00005EFE, 0x02005EFE)


def effective(address: Address) -> Address:
    """Return the address that packets are delivered to: IPv4-mapped and NAT64 addresses stand for an IPv4 address."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address


def is_public(address: Address) -> bool:
    """Return whether `address`, an effective one, is reachable for everybody and reaches no local network."""
    if not address.is_global or address.is_multicast:
        return False
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in network for network in _DENIED_IPV4)
    if address not in _GLOBAL_UNICAST or any(address in network for network in _DENIED_IPV6):
        return False
    return (int(address) >> 32) & 0xFFFFFFFF not in _ISATAP


def is_allowed(address: Address, networks: tuple[Network, ...]) -> bool:
    """Return whether one of the operator's `networks` allows `address`, an effective one.

    A metadata service is allowed by a network of that one address only.
    """
    return any(
        address in network and (address not in METADATA or network.num_addresses == 1)
        for network in networks
        if network.version == address.version
    )
