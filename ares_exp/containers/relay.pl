# The relay in Perl 5.8 or newer, with only the modules of Debian's perl-base. Its source is sent to a container.
use strict;
use IO::Socket::INET;
use Socket qw(IPPROTO_TCP TCP_NODELAY SOL_SOCKET SO_LINGER);
use Errno qw(EAGAIN EWOULDBLOCK EINTR EADDRINUSE);

my ($WINDOW, $CHUNK, $CONNECTIONS) = (262144, 32768, 64);
my ($MORE, $BROKEN, $ACCEPTED) = (0x80000000, 0xFFFFFFFE, 0xFFFFFFFF);
my ($listener, %connections, $count, $heard);
my $LEASE = shift @ARGV; # seconds of silence after which the relay ends; 0: no limit
$heard = '';
$SIG{PIPE} = 'IGNORE';
binmode STDIN;
binmode STDOUT;

sub put {
    my ($number, $word, $data) = @_;
    my $frame = pack('NN', $number, $word) . (defined $data ? $data : '');
    while (length $frame) {
        my $sent = syswrite(STDOUT, $frame);
        if (defined $sent) { substr($frame, 0, $sent) = '' }
        elsif (!$!{EINTR}) { exit }
    }
}

# Ends the relay because its lease has expired. Sends an end frame first, unless stdout is full.
$SIG{ALRM} = sub {
    STDOUT->blocking(0);
    syswrite(STDOUT, pack('NN', 0, 0));
    exit;
};

sub later { return $!{EAGAIN} || $!{EWOULDBLOCK} || $!{EINTR} }

# Closes a connection immediately. The program at its other end sees a reset.
sub drop {
    my $one = shift;
    setsockopt($one->{socket}, SOL_SOCKET, SO_LINGER, pack('ii', 1, 0));
    close $one->{socket};
    delete $connections{$one->{number}};
}

# Closes a connection if both of its directions have ended.
sub finish {
    my $one = shift;
    return if $one->{reads} || $one->{writes};
    close $one->{socket};
    delete $connections{$one->{number}};
}

sub accept_one {
    my $accepted = $listener->accept or return;
    binmode $accepted;
    $accepted->blocking(0);
    setsockopt($accepted, IPPROTO_TCP, TCP_NODELAY, 1);
    $count++;
    $connections{$count} = {
        number => $count, socket => $accepted, credit => $WINDOW, waiting => '', taken => 0,
        reads => 1, writes => 1, ending => 0,
    };
    put($count, $ACCEPTED);
}

sub read_one {
    my $one = shift;
    my $room = $one->{credit} < $CHUNK ? $one->{credit} : $CHUNK;
    my $got = sysread($one->{socket}, my $data, $room);
    if (!defined $got) {
        return if later();
        put($one->{number}, $BROKEN);
        return drop($one);
    }
    $one->{credit} -= $got;
    put($one->{number}, $got, $data);
    if (!$got) { $one->{reads} = 0; finish($one) }
}

sub write_one {
    my $one = shift;
    while (length $one->{waiting}) {
        my $sent = syswrite($one->{socket}, $one->{waiting}, $CHUNK);
        if (!defined $sent) {
            last if later();
            put($one->{number}, $BROKEN);
            return drop($one);
        }
        substr($one->{waiting}, 0, $sent) = '';
        $one->{taken} += $sent;
    }
    if ($one->{taken} >= $WINDOW / 4) {
        put($one->{number}, $MORE + $one->{taken});
        $one->{taken} = 0;
    }
    if ($one->{ending} && $one->{writes} && !length $one->{waiting}) {
        $one->{writes} = 0;
        shutdown($one->{socket}, 1);
        finish($one);
    }
}

sub follow {
    my ($one, $word, $data) = @_;
    if ($word == $BROKEN) { drop($one) }
    elsif ($word & $MORE) { $one->{credit} += $word - $MORE }
    else {
        $one->{waiting} .= $data;
        $one->{ending} = 1 if !$word;
        write_one($one);
    }
}

sub hear {
    my $got = sysread(STDIN, $heard, 65536, length $heard);
    return if !defined $got && later();
    exit if !$got;
    alarm $LEASE;
    while (length $heard >= 8) {
        my ($number, $word) = unpack('NN', $heard);
        my $end = 8 + ($word <= $CHUNK ? $word : 0);
        last if length $heard < $end;
        my $data = substr($heard, 8, $end - 8);
        substr($heard, 0, $end) = '';
        exit if !$number;
        follow($connections{$number}, $word, $data) if $connections{$number};
    }
}

my $said = 'taken';
my $port;
for (@ARGV) {
    $port = $_;
    $listener = IO::Socket::INET->new(LocalAddr => '127.0.0.1', LocalPort => $port, Listen => $CONNECTIONS, ReuseAddr => 1);
    last if $listener;
    $said = "failed $!" if !$!{EADDRINUSE};
}
if (!$listener) { syswrite(STDOUT, "$said\n"); exit }
$listener->blocking(0);
syswrite(STDOUT, "port $port\n");
alarm $LEASE;
while (1) {
    my ($reads, $writes) = ('', '');
    vec($reads, fileno STDIN, 1) = 1;
    vec($reads, fileno $listener, 1) = 1 if keys %connections < $CONNECTIONS;
    my @all = values %connections;
    for my $one (@all) {
        vec($reads, fileno $one->{socket}, 1) = 1 if $one->{reads} && $one->{credit};
        vec($writes, fileno $one->{socket}, 1) = 1 if length $one->{waiting};
    }
    next if select($reads, $writes, undef, undef) < 0;
    my @ready = map { [$_, vec($reads, fileno $_->{socket}, 1), vec($writes, fileno $_->{socket}, 1)] } @all;
    hear() if vec($reads, fileno STDIN, 1);
    for (@ready) {
        my ($one, $reads, $writes) = @$_;
        read_one($one) if $reads && $connections{$one->{number}};
        write_one($one) if $writes && $connections{$one->{number}};
    }
    accept_one() if vec($reads, fileno $listener, 1);
}
