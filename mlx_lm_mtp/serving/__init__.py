"""Stock's server with drafts: who computes when, what a request asks for, totals."""
