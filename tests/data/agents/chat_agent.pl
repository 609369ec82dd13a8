# The agent of the tests in Perl, with what Debian's perl-base has: for images without Python.
use strict; use warnings; use IO::Socket::INET;
my ($host, $port) = $ENV{ARES_LLM_URL} =~ m{^http://([^:/]+):(\d+)$} or die "no URL";
sub quoted { my $text = shift; $text =~ s/([^ -!#-\[\]-~])/sprintf '\\u%04x', ord $1/ge; return "\"$text\"" }
my @messages = ('{"role":"user","content":' . quoted(join '', <STDIN>) . '}');
while (1) {
    my $body = '{"model":"m","messages":[' . join(',', @messages) . ']}';
    my $socket = IO::Socket::INET->new(PeerAddr => $host, PeerPort => $port) or die "no connection: $!";
    print $socket "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n",
        "Authorization: Bearer $ENV{ARES_LLM_KEY}\r\nContent-Length: ", length $body, "\r\n\r\n$body";
    my $answer = join '', <$socket>;
    my ($reply) = $answer =~ /"content": ?"((?:[^"\\]|\\.)*)"/ or die "no content: $answer";
    $reply =~ s/\\n/\n/g; $reply =~ s/\\(.)/$1/g;
    print "$reply\n";
    exit 0 if $reply =~ /^DONE/;
    my $shown = `$reply 2>&1`;
    push @messages, '{"role":"assistant","content":' . quoted($reply) . '}', '{"role":"user","content":' . quoted("shown: $shown") . '}';
}
