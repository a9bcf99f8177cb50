# SPDX-License-Identifier: Apache-2.0
"""`nvcomm bench`: latency of the collectives, in the columns of nccl-tests, with the data checked first."""
